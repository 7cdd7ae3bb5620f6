"""The global generators of torch's CPU, Python and numpy: whether code drew from them, told in microseconds.

Seeding all three takes as long as fetching twenty small samples, and most samples draw from none. So torch's is given
the seed alone, which ``torch.initial_seed()`` then answers, and all are looked at afterwards. Their public readers turn
each of 624 words into an object (20 to 100 microseconds): the words are read where they lie, if they are where CPython
and numpy are known to keep them, which is tried when this is imported; else by the public readers.
"""

import ctypes
import random
import struct
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from fastckpt.data.generators import seed_generators

_WORDS = "625I"
_BYTES = struct.calcsize(_WORDS)
_SEED, _NEXT, _NORMALS = 8, 16, 8 + 16 + 624 * 8
"""Bytes of a state of torch's: the seed; behind it what place its words have; where the words end."""
_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]


class Watch:
    """Seeds generators for the samples of a batch, and tells from which of them something was drawn.

    One from which nothing was ever drawn is not seeded: of torch's only the seed is set, not the words that follow from
    it, so that what is drawn from it then must not be used.

    Args:
        drawn: Which are seeded.
        restores: Whether `restore` will be called.
    """

    def __init__(self, drawn: Collection[str], *, restores: bool) -> None:
        self._drawn = drawn
        self._before = torch.default_generator.get_state()
        self._python = _python() if restores or "python" not in drawn else ()
        self._numpy = _numpy.state() if restores or "numpy" not in drawn else b""
        self._planted = self._before.clone()
        words = self._planted.numpy()
        words[_NORMALS:] = 0  # a normal number that is kept would be handed out without a trace in what is compared
        self._seed = words[:_SEED].view(np.uint64)
        self._place = _place(self._planted)
        self._moved = False
        torch.default_generator.set_state(self._planted)

    def seed(self, number: int) -> None:
        """Seed them for what comes next; ``torch.initial_seed()`` gives this number, which is below 2**64."""
        if self._drawn:
            seed_generators(number, self._drawn)
        if "torch" not in self._drawn:
            self._look()  # the next line wipes out the traces of draws
            self._seed[0] = number
            torch.default_generator.set_state(self._planted)

    def moved(self) -> set[str]:
        """From which generators something was drawn, though they were not seeded."""
        found = set()
        if "torch" not in self._drawn:
            self._look()
            found |= {"torch"} if self._moved else set()
        if "python" not in self._drawn and _python() != self._python:
            found.add("python")
        if "numpy" not in self._drawn and _numpy.moved(self._numpy):
            found.add("numpy")
        return found

    def restore(self) -> None:
        """Put the generators into the states that they had before."""
        torch.default_generator.set_state(self._before)
        if _python() != self._python:
            if _known:
                place, *words = struct.unpack(_WORDS, self._python[0])
                random.setstate((random.Random.VERSION, (*words, place), self._python[1]))
            else:
                random.setstate(self._python)
        if _numpy.moved(self._numpy):
            _numpy.restore(self._numpy)

    def _look(self) -> None:
        self._moved = self._moved or _place(torch.default_generator.get_state()) != self._place


def _place(state: torch.Tensor) -> bytes:
    """How many words of a state of torch's are left, and which is the next: what each draw changes."""
    return ctypes.string_at(state.data_ptr() + _SEED, _NEXT)


def _python() -> tuple[Any, ...]:
    if not _known:
        return random.getstate()
    return ctypes.string_at(id(_PYTHON) + object.__basicsize__, _BYTES), _PYTHON.gauss_next  # type: ignore[attr-defined]


def _is_known() -> bool:
    """Whether CPython keeps the place, then the words, behind the head of the object."""
    if type(_PYTHON).__basicsize__ < object.__basicsize__ + _BYTES:
        return False
    *words, place = random.getstate()[1]
    return ctypes.string_at(id(_PYTHON) + object.__basicsize__, _BYTES) == struct.pack(_WORDS, place, *words)


class _Numpy:
    """numpy's: the normal number that it may keep can only be read with all words, so it is read when these change."""

    def __init__(self) -> None:
        self._settled = b""
        self._known = True

    def state(self) -> Any:
        if self._known and self._words() == self._settled:
            return self._settled
        state: Any = np.random.get_state(legacy=False)
        inner = state["state"]
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
            *words, place = struct.unpack(_WORDS, state)
            state = ("MT19937", np.array(words, np.uint32), place, 0, 0.0)
        np.random.set_state(state)

    def _words(self) -> bytes:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        return ctypes.string_at(generator.ctypes.state_address, _BYTES)


_known = _is_known()
_numpy = _Numpy()
