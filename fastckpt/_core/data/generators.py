"""The global generators of torch's CPU, Python and numpy: seeded, kept, and draws from them detected in microseconds.

Seeding all three takes as long as fetching twenty small samples, and most samples draw from none. A draw shows in the
state. Public readers of Python's and numpy's states turn each of 624 words into an object (20 to 100 microseconds). So
the words are read from memory if they are where CPython and numpy are known to keep them, which is checked at import;
else by the public readers.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

KINDS = ("torch", "python", "numpy")
_WORDS = "625I"
_BYTES = struct.calcsize(_WORDS)
_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
_PYTHON_STATE = id(_PYTHON) + object.__basicsize__


def seed_generators(seed: int, kinds: Collection[str] = KINDS) -> None:
    """Seed the generators; ``torch.initial_seed()`` then gives ``seed``, for generators that a data set makes itself.

    Args:
        seed: Below 2**64.
        kinds: The generators to seed.
    """
    if "torch" in kinds:
        torch.default_generator.manual_seed(seed)
    if "python" in kinds:
        random.seed(seed)
    if "numpy" in kinds and (numpy := sys.modules.get("numpy")):
        numpy.random.seed(seed // 2**32)  # torch's takes the lower half, into the same kind of generator


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators at the end of the with block to their states at its beginning."""
    watch = DrawWatch((), restores=True)
    try:
        yield
    finally:
        watch.restore(watch.moved())


class DrawWatch:
    """The states of the generators before a batch is made, to detect those that were drawn from.

    Args:
        but: Generators that are seeded anyway.
        restores: True if `restore` will be called.
    """

    def __init__(self, but: Collection[str], *, restores: bool) -> None:
        self._but = but
        self._torch = _torch()
        # A generator that is seeded anyway need not be compared; it is read only to be put back.
        self._python = _python() if restores or "python" not in but else ()
        self._numpy = _numpy.state() if restores or "numpy" not in but else b""

    def moved(self) -> set[str]:
        """The names of the other generators that were drawn from."""
        found = {
            "torch": "torch" not in self._but and _torch() != self._torch,
            "python": "python" not in self._but and _python() != self._python,
            "numpy": "numpy" not in self._but and _numpy.moved(self._numpy),
        }
        return {kind for kind, is_moved in found.items() if is_moved}

    def restore(self, moved: Collection[str]) -> None:
        """Put the generators into the states that they had before: those that are seeded anyway, and these."""
        moved = {*moved, *self._but}
        if "torch" in moved:
            torch.default_generator.set_state(torch.frombuffer(bytearray(self._torch), dtype=torch.uint8))
        if "python" in moved:
            if _known:
                place, *words = struct.unpack(_WORDS, self._python[0])
                random.setstate((random.Random.VERSION, (*words, place), self._python[1]))
            else:
                random.setstate(self._python)
        if "numpy" in moved:
            _numpy.restore(self._numpy)


class SeedWatch:
    """Detects that this thread asks for torch's seed, as data sets do that make generators themselves.

    Attributes:
        asked: True if it did.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "SeedWatch":
        # A profile function sees calls into C, and initial_seed() is one that leaves no trace in any state.
        self._before = sys.getprofile()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _look(self, _frame: object, event: str, argument: Any) -> None:
        if event == "c_call" and argument.__name__ == "initial_seed":
            self.asked = True


def _torch() -> bytes:
    """The state of torch's generator as bytes, which compare ten times as fast as tensors."""
    return torch.default_generator.get_state().numpy().tobytes()


def _python() -> tuple[Any, ...]:
    if not _known:
        return random.getstate()
    # gauss_next is the second of a pair of normal numbers that random.gauss keeps for its next call.
    return ctypes.string_at(_PYTHON_STATE, _BYTES), _PYTHON.gauss_next  # type: ignore[attr-defined]


def _is_known() -> bool:
    """Return whether CPython keeps the index, then the words, after the head of the object."""
    if type(_PYTHON).__basicsize__ < object.__basicsize__ + _BYTES:
        return False
    # Compared with the public reader once: on another build of CPython the slow way is taken, never a wrong one.
    *words, place = random.getstate()[1]
    return ctypes.string_at(_PYTHON_STATE, _BYTES) == struct.pack(_WORDS, place, *words)


class _Numpy:
    """numpy's: the normal number that it may keep can only be read with all words, so it is read when these change."""

    def __init__(self) -> None:
        self._settled = b""
        self._known = True
        self._generator: Any = None
        self._place = 0

    def state(self) -> Any:
        if self._known and self._words() == self._settled:
            return self._settled
        state: Any = np.random.get_state(legacy=False)
        inner = state["state"]
        # The same check for numpy, at each full reading: np.random.seed may have put another generator in place.
        words = self._words()
        self._known = self._known and words == inner["key"].tobytes() + struct.pack("I", inner["pos"])
        if not self._known or state["has_gauss"]:
            return state
        self._settled = words
        return words

    def moved(self, since: Any) -> bool:
        return not isinstance(since, bytes) or self._words() != since

    def restore(self, state: Any) -> None:
        if isinstance(state, bytes):
            words = np.frombuffer(state, np.uint32)  # a list of Python's integers takes ten times as long
            state = ("MT19937", words[:-1], int(words[-1]), 0, 0.0)
        np.random.set_state(state)

    def _words(self) -> bytes:
        return ctypes.string_at(self._address(), _BYTES)

    def _address(self) -> int:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        # set_bit_generator replaces the global generator, and its state is at another address then.
        if generator is not self._generator:
            self._generator, self._place = generator, generator.ctypes.state_address
        return self._place


_known = _is_known()
_numpy = _Numpy()
