"""Lines of the product that each test executes, in whichever of its processes; noted at once, as these are killed.

Loaded by `tests/start/sitecustomize.py` where TEST_CALLS names a folder, and by pytest as a plugin. A process notes the
lines of a test in a mapped file of its own: the test's name, and a byte for each line of the product.
"""

import ctypes
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ROOT = str(Path(__file__).parents[2]) + os.sep
PRODUCT = ("fastckpt", "fastckpt_run")
NAME = 1024
"""Bytes for the name of a test, before those of the lines."""
MOST = 20_000
"""Executed lines of a function after which a process notes no more of it in a test: loops would take too long."""


def prepare(folder: Path) -> None:
    """Make the folder, and note where in a file the lines of each module begin."""
    folder.mkdir(parents=True)
    begins, sum_of = {}, NAME
    for path in sorted(path for house in PRODUCT for path in Path(ROOT, house).rglob("*.py")):
        begins[str(path.relative_to(ROOT))] = sum_of
        sum_of += len(path.read_text().splitlines()) + 1
    (folder / "modules.json").write_text(json.dumps({"begins": begins, "size": sum_of}))


@dataclass
class Function:
    """A function that a test executes.

    Attributes:
        code: Its code, which is kept, so that no other one gets its id.
        begin: Where the lines of its module begin in a file; 0 if it is none of the product.
        left: Lines that are not noted yet.
        budget: Executed lines after which no more are noted.
    """

    code: CodeType
    begin: int
    left: set[int]
    budget: int = MOST

    @property
    def is_done(self) -> bool:
        """True if there is nothing more to note."""
        return not self.left or self.budget <= 0


class Notes:
    """Lines that this process has executed for a test."""

    def __init__(self, folder: str) -> None:
        self._folder, self._environment, self._pid = folder, os.environ, os.getpid  # modules are cleared at the end
        modules = json.loads(Path(folder, "modules.json").read_text())
        self._begins = {ROOT + name: begin for name, begin in modules["begins"].items()}
        self._size = modules["size"]
        self._system = ctypes.CDLL(None)  # its mmap keeps no descriptor, which tests would count
        self._system.mmap.restype = ctypes.c_void_p
        self._system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.forget()

    def forget(self) -> None:
        """Note again what is executed from here on: in another process, or for another test."""
        self._test = ""
        self._map: Any = None  # never unmapped: another thread may write there
        self._functions: dict[int, Function] = {}

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """Trace a function of which not all lines have been noted."""
        code = frame.f_code
        if (function := self._functions.get(id(code))) is None:
            begin = self._begins.get(code.co_filename, 0)
            lines = {line for _, _, line in code.co_lines() if line} if begin else set()
            function = self._functions[id(code)] = Function(code, begin, lines)
        if function.is_done:
            return None
        self._note(function, frame.f_lineno)
        return self._traced(function)

    def _traced(self, function: Function) -> Callable[[FrameType, str, object], Any]:
        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                function.budget -= 1
                if frame.f_lineno in function.left:
                    self._note(function, frame.f_lineno)
            if function.is_done:
                frame.f_trace = None  # None as the result alone would leave it as it is
                return None
            return trace

        return trace

    def _note(self, function: Function, line: int) -> None:
        test = self._environment.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if test != self._test:
            self.forget()
            if test:
                self._open(test)
        function.left.discard(line)
        if self._map is not None:
            self._map[function.begin + line] = 1

    def _open(self, test: str) -> None:
        self._test = test
        number = 0
        while True:
            path = f"{self._folder}/{self._pid()}-{number}.lines"
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                break
            except FileExistsError:
                number += 1
        os.ftruncate(file, self._size)
        address = self._system.mmap(None, self._size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        os.close(file)
        self._map = (ctypes.c_ubyte * self._size).from_address(address)
        name = test.encode()[:NAME]
        self._map[: len(name)] = name


_notes: Notes | None = None


def begin(folder: str) -> None:
    """Note from now on the lines of each test that this process, and those that are forked from it, execute."""
    global _notes
    _notes = Notes(folder)
    threading.settrace(_notes.trace)
    sys.settrace(_notes.trace)
    sys.gettrace = lambda: None  # else the launcher, which asks, would fork no workers, and tests of these fail
    os.register_at_fork(after_in_child=_notes.forget)


def pytest_runtest_logstart() -> None:
    """Note again what is executed from here on: another test begins."""
    if _notes is not None:
        _notes.forget()
        sys.settrace(_notes.trace)  # the test before may have traced what it tried itself, and ended that


def pytest_runtest_logreport(report: "pytest.TestReport") -> None:
    """Note how long each test takes, and how it ends."""
    folder = os.environ.get("TEST_CALLS")
    if folder and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(folder, "durations").open("a") as file:
            file.write(f"{report.nodeid}\t{report.when}\t{report.duration:.3f}\t{report.outcome}\n")
