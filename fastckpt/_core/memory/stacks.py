"""The Python stacks of a worker, which another process can ask for, also while the worker hangs."""

import contextlib
import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastckpt._core.policy.stack_groups import Frame

_NAME = "fastckpt-stacks"
_LINK = f"/memfd:{_NAME} (deleted)"
_FD_BITS = 32
_POLL = 0.05
_QUIET = 0.3
"""Seconds without a further line after which stacks are complete: their writer does nothing else meanwhile."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_offer: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Stacks:
    """The stacks of all threads of a process, as faulthandler writes them; empty if it did not.

    Attributes:
        text: The stacks.
        frames: That of its main thread, the innermost frame first; empty if that is not known.
    """

    text: str = ""
    frames: tuple[Frame, ...] = ()

    @property
    def innermost(self) -> Frame | None:
        """Innermost frame of the main thread; None if it is not known."""
        return self.frames[0] if self.frames else None


def offer() -> int:
    """Let other processes of this user `ask` for the stacks of this one, from now on; returns a token, 0 for none.

    faulthandler writes them, in the handler of a real-time signal that nobody here uses: without the GIL, wherever the
    process is caught. They go to a file in memory that is gone with the process.
    """
    global _offer
    if _offer[0] != os.getpid():
        _offer = (os.getpid(), _register())
    return _offer[1]


def _register() -> int:
    number = _unused_signal()
    if not number:
        return 0
    try:
        fd = os.memfd_create(_NAME)
    except OSError:
        return 0
    os.write(fd, f"{threading.main_thread().ident:x}\n".encode())
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    return number << _FD_BITS | fd


def _unused_signal() -> int:
    """A real-time signal that this process neither handles, ignores nor blocks; 0 if there is none."""
    try:
        used = _signals(os.getpid(), "Blk|Ign|Cgt")
    except OSError:
        return 0
    free = [n for n in range(signal.SIGRTMAX - 2, signal.SIGRTMIN + 2, -1) if n not in used]
    return free[0] if free else 0


def _signals(pid: int, kinds: str) -> set[int]:
    """The signals that a process blocks, ignores or catches, as the kernel calls that; raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(mask, 16) for mask in re.findall(rf"^Sig(?:{kinds}):\s*([0-9a-f]+)$", status, re.MULTILINE)]
    return {number for number in range(1, signal.NSIG) if any(mask >> (number - 1) & 1 for mask in masks)}


def ask(workers: Mapping[int, tuple[int, int]], timeout: float) -> dict[int, Stacks]:
    """The stacks of processes, each given by its pid and token; waits up to ``timeout`` seconds for them."""
    end = time.monotonic() + timeout
    asked = {key: question for key, (pid, token) in workers.items() if (question := _Question.put(pid, token))}
    try:
        while time.monotonic() < end and not all([question.is_answered() for question in asked.values()]):
            time.sleep(_POLL)
        return {key: asked[key].answer() if key in asked else Stacks() for key in workers}
    finally:
        for question in asked.values():
            question.close()


class _Question:
    """A process that was asked for its stacks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begin = self._size = os.fstat(fd).st_size
        self._grown = 0.0

    @classmethod
    def put(cls, pid: int, token: int) -> "_Question | None":
        """Ask a process; None if it cannot be asked."""
        number, path = token >> _FD_BITS, Path(f"/proc/{pid}/fd/{token & (1 << _FD_BITS) - 1}")
        with contextlib.suppress(OSError):
            if not token or str(path.readlink()) != _LINK or number not in _signals(pid, "Cgt"):
                return None  # another process by now, or it has reset its handlers: the signal would end it
            question = cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            with contextlib.suppress(OSError):
                os.kill(pid, number)
            return question
        return None

    def is_answered(self) -> bool:
        """Return whether the process seems to have written its stacks."""
        size, now = os.fstat(self._fd).st_size, time.monotonic()
        if size != self._size:
            self._size, self._grown = size, now
        return self._grown > 0 and now - self._grown > _QUIET

    def answer(self) -> Stacks:
        """Return the stacks that the process has written since the request."""
        text = os.pread(self._fd, 1 << 20, self._begin).decode(errors="replace")
        return Stacks(text, _frames(text, os.pread(self._fd, 32, 0).decode(errors="replace").partition("\n")[0]))

    def close(self) -> None:
        """Ask no more."""
        os.close(self._fd)


def _frames(text: str, main: str) -> tuple[Frame, ...]:
    """The stack of the thread with number ``main``, in hexadecimal digits; the innermost frame first."""
    for thread in _THREAD.finditer(text):
        if thread[1].lstrip("0") == main:
            following = _THREAD.search(text, thread.end())
            end = following.start() if following else len(text)
            return tuple(Frame(*frame.groups()) for frame in _FRAME.finditer(text, thread.end(), end))
    return ()
