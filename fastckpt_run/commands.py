"""The entry points of both commands; a torch that is missing or too old is one line on stderr, not a traceback."""

import gc
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from fastckpt_run.first_process import leave_to_child
from fastckpt_run.preload.environment import unless_set


def launch() -> None:
    """The command fastckpt-run."""
    leave_to_child()  # before threads and children of its own
    with _readable("fastckpt-run"):
        # Before torch is imported here, so that a template imports it at the same time.
        head_start = import_module("fastckpt_run.preload.head_start")
    head_start.begin(sys.argv[1:])
    try:
        _start("fastckpt-run", "fastckpt_run.main")
    finally:
        head_start.end()


def tools() -> None:
    """The command fastckpt."""
    _start("fastckpt", "fastckpt_run.cli")


def version_line(command: str) -> str:
    """The output of a command's ``--version``. Imports nothing: torch would take a second."""
    from fastckpt._core.version import VERSION  # fails where torch is missing

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "missing"
    return f"{command} {VERSION} (torch {torch}, Python {platform.python_version()})"


def _start(command: str, module: str) -> None:
    # torch reads the level when it is imported; workers are to have their own. Without it a store that is lost would
    # print a stack of C++ for each connection, around the line that reports it.
    with _readable(command), _uncollected(), unless_set("TORCH_CPP_LOG_LEVEL", "ERROR"):
        import_module("fastckpt")
        main = import_module(module).main
    main()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Exclude modules imported in here from garbage collection, now and later: all of them stay."""
    # torch makes half a million objects, through which Python's collector goes again and again: a third of the time.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _readable(command: str) -> Iterator[None]:
    """Imports in here that fail for lack of torch end the command with one line."""
    try:
        yield
    except ImportError as error:
        # Another module that is missing is a broken installation: its traceback counts.
        if error.name != "torch":
            raise
        print(f"{command}: error: {error}", file=sys.stderr)
        sys.exit(2)
