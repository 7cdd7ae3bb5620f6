"""Traces of imports that make a process unfit for forking workers from it."""

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastckpt_run.preload.environment import current
from fastckpt_run.preload.import_effects import SET


class Traces:
    """The state of this process, as far as a fork would not inherit it, or a fresh process not have it.

    ``tasks`` are threads of the kernel, which libraries start without Python; OpenBLAS ends its own at a fork.
    """

    def __init__(self) -> None:
        self.descriptors = _descriptors()
        self.tasks = frozenset(os.listdir("/proc/self/task"))  # noqa: PTH208
        # A fork has its calling thread alone: locks that others held stay locked for ever.
        self.threads = threading.active_count()
        self.handlers = {n: signal.getsignal(n) for n in signal.valid_signals()}
        self.environment = current()
        self.folder = working_directory()
        self.generators = _generators()
        self.seeds = len(_seeds)
        self.python = _python()
        self.shared = _shared_memory()
        self.parental = _has_children()
        self.traced = sys.gettrace() is not None or sys.getprofile() is not None
        self.devices = _torch("cuda", "is_initialized") or any("/dev/nvidia" in name for name in self.descriptors)
        self.groups = _torch("distributed", "is_initialized")

    def base_faults(self, before: "Traces") -> Iterator[str]:
        """Reasons why torch itself, imported since ``before``, makes this process unfit."""
        # A CUDA context does not survive a fork.
        if self.devices:
            yield "initialised CUDA"
        if self.groups:
            yield "initialised a process group"
        if self.threads > 1:
            yield "started a thread"
        if self.parental:
            yield "started a process"
        if self.traced:
            yield "is traced"
        if changed := [n for n, handler in self.handlers.items() if handler != before.handlers[n]]:
            yield f"changed the handler of {signal.Signals(changed[0]).name}"
        yield from self._holdings(before)

    def _holdings(self, before: "Traces") -> Iterator[str]:
        if self.shared - before.shared:
            yield f"mapped memory that forks share ({min(self.shared - before.shared)})"
        if self.descriptors - before.descriptors:
            yield f"opened {', '.join(sorted(self.descriptors - before.descriptors))}"
        if self.folder != before.folder:
            yield "changed the working directory"

    def faults(self, before: "Traces") -> Iterator[str]:
        """Reasons why modules imported since ``before`` make this process unfit."""
        yield from self.base_faults(before)
        if self.tasks - before.tasks and self.threads == before.threads:
            yield "started a thread in native code"
        if changed := (self.environment.items() ^ before.environment.items()) - SET:
            yield f"changed the variable {min(name for name, _ in changed)}"
        for name, value in before.python.items():
            if self.python[name] != value:
                yield f"changed {name}"
        for name, state in before.generators.items():
            now = self.generators[name]
            if now != state and not (name == "random" and _has_only_drawn(state, now)):
                yield f"used the random generator of {name}"
        if (
            self.seeds != before.seeds and self.generators.keys() == before.generators.keys()
        ):  # numpy's own is seeded again
            yield "made a random generator without a seed, which all workers would share"


_seeds: list[int] = []
_MOST_DRAWN = 16
"""Number of times that draws of imports may exhaust a generator's 624 words, so that it makes new ones."""


@contextmanager
def seeds_counted() -> Iterator[None]:
    """Notice generators that numpy seeds from the system, because no seed was given.

    Those of Python's own library are accepted: many packages make one, for values that need not be repeatable.
    """
    urandom = random._urandom  # type: ignore[attr-defined]

    def counted(size: int) -> bytes:
        _seeds.append(size)
        return bytes(urandom(size))

    random._urandom = counted  # type: ignore[attr-defined]
    try:
        yield
    finally:
        random._urandom = urandom  # type: ignore[attr-defined]


def working_directory() -> str:
    """The working directory of this process, also if it was removed."""
    return os.readlink("/proc/self/cwd")  # noqa: PTH115


def _python() -> dict[str, Any]:
    """Objects that a worker makes again, so that a change by an import would be lost."""
    found: dict[str, Any] = {"sys.argv": sys.argv.copy(), "the first entry of sys.path": sys.path[:1]}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        found[f"sys.{name}"] = [
            id(stream),
            *(getattr(stream, a, None) for a in ("encoding", "errors", "line_buffering")),
        ]
    return found


def _shared_memory() -> frozenset[str]:
    """Mappings that a fork shares with its parent, such as the lock of a multiprocessing.Lock: place and name."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return frozenset(f"{line[-1]} at {line[0]}" for line in lines if line[1][3] == "s")


def _has_children() -> bool:
    try:
        # WNOWAIT: looking for children must not reap one that the script waits for.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descriptors() -> frozenset[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found.add(f"{os.readlink(f'/proc/self/fd/{name}')} (descriptor {name})")  # noqa: PTH115
        except FileNotFoundError:
            continue  # the one that listed the directory
    return frozenset(found)


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy.random" in sys.modules:
        states["numpy"] = str(sys.modules["numpy.random"].get_state())
    if "torch" in sys.modules:
        states["torch"] = bytes(sys.modules["torch"].get_rng_state().numpy())
    return states


def _has_only_drawn(before: Any, now: Any) -> bool:
    """Return whether the second state of Python's generator follows from the first one without a seed.

    It is seeded by the system, in a fork as in a new process: numbers drawn since have no effect.
    """
    generator = random.Random()
    generator.setstate(before)
    for _ in range(_MOST_DRAWN):
        if generator.getstate()[1][:-1] == now[1][:-1]:  # the words; then comes how many of them have been drawn
            return True
        generator.getrandbits(32 * 624)
    return False


def _torch(part: str, question: str) -> bool:
    module = sys.modules.get(f"torch.{part}")
    return module is not None and bool(getattr(module, question, bool)())
