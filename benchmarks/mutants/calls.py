"""Functions of the product that each test calls, in whichever of its processes; noted at once, as these are killed.

Loaded by `tests/start/sitecustomize.py` where TEST_CALLS names a folder, and by pytest as a plugin.
"""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = str(Path(__file__).parents[2]) + os.sep
PRODUCT = (ROOT + "fastckpt" + os.sep, ROOT + "fastckpt_run" + os.sep)
_seen: set[int] = set()


def begin(folder: str) -> None:
    """Note the first call of each function in each test from now on, in a file of this process in ``folder``."""
    seen, environment, pid, files = _seen, os.environ, os.getpid, Path(folder)  # modules are cleared at the end

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if id(code) in seen:
            return
        seen.add(id(code))
        if code.co_filename.startswith(PRODUCT):
            test = environment.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            line = f"{test}\t{code.co_filename.removeprefix(ROOT)}\t{code.co_firstlineno}\n"
            with (files / f"{pid()}.calls").open("a") as file:
                file.write(line)

    threading.settrace(note)
    sys.settrace(note)
    sys.gettrace = lambda: None  # else the launcher, which asks, would fork no workers, and tests of these fail
    os.register_at_fork(after_in_child=_seen.clear)


def pytest_runtest_logstart() -> None:
    """Note again what is called from here on: another test begins."""
    _seen.clear()


def pytest_runtest_logreport(report: "pytest.TestReport") -> None:
    """Note how long each test takes, and how it ends."""
    folder = os.environ.get("TEST_CALLS")
    if folder and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(folder, "durations").open("a") as file:
            file.write(f"{report.nodeid}\t{report.when}\t{report.duration:.3f}\t{report.outcome}\n")


def called(folder: Path) -> Iterator[tuple[str, str, int]]:
    """The tests that have called functions: the test, the module, and the line at which the function begins."""
    for path in folder.glob("*.calls"):
        for line in path.read_text().splitlines():
            test, module, first = line.split("\t")
            if test:
                yield test, module, int(first)
