"""Turn a fork of the template into the likeness of a fresh interpreter, and run a script in it."""

import builtins
import ctypes
import importlib
import importlib.machinery
import io
import os
import runpy
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from fastckpt_run.parent_death import die_with
from fastckpt_run.preload import environment, import_effects
from fastckpt_run.preload.fork_request import GO, ForkReport, ForkRequest

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_kept: list[object] = []
"""The command line and environment that /proc shows: the kernel reads them from this memory."""


class ForkedProcess:
    """A fork of the template that becomes a worker."""

    def __init__(self, stdin: int, stdout: int, stderr: int, memory: int, go: int, *, printed: list[int]) -> None:
        """Take over the worker's own state; returns when the agent lets it go, and else ends the process."""
        self._order, self._report = ForkRequest.read(memory), ForkReport(memory)
        self._pid = os.getpid()
        # 1. environment, command line, signals   2. wait for the agent, which may kill this process until then
        # 3. the agent's death signal, once the agent is the parent   4. descriptors and text streams
        # 5. output of imports in the template, as if they ran here   6. seeds, keys, thread ids, kept ranks
        output = [os.pread(descriptor, size, 0) for descriptor, size in zip((1, 2), printed, strict=True)]
        environment.replace(self._order.environment | import_effects.variables())
        _show(self._order.argv, self._order.environment)
        _restore_signals(set(self._order.ignored))
        # End of file: the agent has died, or given this fork up.
        if os.read(go, 1) != GO:
            os._exit(1)
        # Only now: until the process between has ended, the parent is not the agent.
        die_with(self._order.parent)
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, number)
        # Before all descriptors are closed: Python's mmap closes a duplicate of its descriptor when it is destroyed.
        self._report.keep()
        _close_all_but_streams()
        _open_streams()
        for number, text in enumerate(output, start=1):
            os.write(number, text)
        _renew_identity()
        import_effects.read_ranks()

    def script(self) -> Callable[[], int]:
        """A function that runs the script as Python does; `end` takes its result.

        It shows a traceback, and returns another number than 0, if the script raised; after SystemExit it does not
        return. A file is run without any frame of ours, but for the caller's, below its own.
        """
        sys.orig_argv = self._order.argv.copy()
        script = self._order.argv[2:]
        sys.argv = script if script[0] != "-m" else ["-m", *script[2:]]
        _reset_modules()
        if script[0] == "-m":
            if not sys.flags.safe_path:
                sys.path.insert(0, str(Path.cwd()))
            return partial(_run_module, script[1], alter_argv=True)
        path = _absolute(script[0])
        if get_importer(path) is not None:
            sys.path.insert(0, path)
            return partial(_run_module, "__main__", alter_argv=False)
        if not sys.flags.safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(script[0])))  # noqa: PTH120
        return _file(path)

    def end(self, failed: int) -> None:
        """End this process as Python does, by returning or by SystemExit, after a report of the script's exception."""
        if not failed:
            return
        error = getattr(sys, "last_value", None)
        if error is not None and os.getpid() == self._pid:  # it may be a fork of the script's own
            self._report.write("".join(traceback.format_exception(error)))
        if not isinstance(error, KeyboardInterrupt):  # Python itself ends with the signal then
            sys.exit(1)


def _file(path: str) -> Callable[[], int]:
    """A function that runs a file through CPython's own function for that."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = libc.fopen(os.fsencode(path), b"rb")
    if not file:
        _refuse(path)
    # The function that `python script.py` itself calls: __main__, tracebacks and exit codes are the same.
    run = ctypes.pythonapi.PyRun_AnyFileExFlags
    run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    return partial(run, file, os.fsencode(path), 1, None)


def _refuse(path: str) -> NoReturn:
    try:
        Path(path).open("rb").close()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
    sys.exit(2)


def _run_module(name: str, *, alter_argv: bool) -> int:
    """Run a module as ``python -m`` does; another number than 0 if it raised."""
    try:
        runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 (as Python does)
        caught, trace = error, _below(error)
    else:
        return 0
    sys.last_type, sys.last_value, sys.last_traceback = type(caught), caught, trace
    _print(caught.with_traceback(trace))
    if isinstance(caught, KeyboardInterrupt):
        _end_by_interrupt()
    return 1


def _below(error: BaseException) -> TracebackType | None:
    """The traceback of an error without the frame of ours that caught it."""
    return error.__traceback__.tb_next if error.__traceback__ is not None else None


def _print(error: BaseException) -> None:
    """Show an error that nothing caught, as PyErr_Print does."""
    trace = error.__traceback__
    failure: BaseException | None = None
    if not hasattr(sys, "excepthook"):
        sys.stderr.write("sys.excepthook is missing\n")
        sys.__excepthook__(type(error), error, trace)
        return
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as raised:  # noqa: BLE001 (as Python does)
        failure = raised
    if failure is not None:
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(failure), failure.with_traceback(_below(failure)), _below(failure))
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error.with_traceback(trace), trace)


def _end_by_interrupt() -> None:
    """Have Python end this process by SIGINT: it notes that the code of a string was interrupted."""
    hook, shown = sys.__excepthook__, (sys.last_type, sys.last_value, sys.last_traceback)
    sys.excepthook = lambda *_: None
    ctypes.pythonapi.PyRun_SimpleString(b"raise KeyboardInterrupt")
    sys.excepthook = hook
    sys.last_type, sys.last_value, sys.last_traceback = shown


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{Path.cwd()}/{path}"


def _show(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have /proc show this command line and environment, where the kernel lets it."""
    arguments, variables = (
        b"".join(os.fsencode(text) + b"\0" for text in texts)
        for texts in (argv, (f"{name}={value}" for name, value in environment.items()))
    )
    text = ctypes.create_string_buffer(arguments + variables)
    start = ctypes.addressof(text)
    middle, end = start + len(arguments), start + len(arguments) + len(variables)
    stat = [0, *map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:])]
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    # struct prctl_mm_map: code, data, brk and stack as they are (numbered as in proc_pid_stat(5), from 3), then the
    # arguments and the environment; no auxv, and no other executable.
    memory = (*stat[23:25], *stat[42:44], stat[44], libc.sbrk(0), stat[25])
    image = struct.pack("=12Q2I", *memory, start, middle, middle, end, 0, 0, 0xFFFFFFFF)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, image, len(image), 0)
    _kept.append(text)


def _restore_signals(ignored: set[int]) -> None:
    """The dispositions that Python finds and makes in a process if its parent ignores ``ignored``."""
    usual: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGPIPE: signal.SIG_IGN,
        signal.SIGXFSZ: signal.SIG_IGN,
    }
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        wanted = signal.SIG_IGN if number in ignored else usual.get(number, signal.SIG_DFL)
        if signal.getsignal(number) != wanted:
            signal.signal(number, wanted)


def _close_all_but_streams() -> None:
    """Close all other descriptors: only open ones, because the limit may allow a thousand million."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2:
            with suppress(OSError):  # the one that lists them
                os.close(int(name))


def _open_streams() -> None:
    """New text streams over the descriptors 0, 1, 2, as Python -u makes them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        mode = "w" if number else "r"
        binary: Any = open(number, f"{mode}b", buffering=0 if number else -1, closefd=False)  # noqa: SIM115
        raw = binary if number else binary.raw
        raw.name = f"<{name}>"
        text = io.TextIOWrapper(binary, old.encoding, old.errors, newline="\n", write_through=True)
        text.mode = mode  # type: ignore[misc]
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _renew_identity() -> None:
    """Renew state that no two processes may share: seeds, keys, the id of the main thread."""
    if "torch" in sys.modules:
        # A fork inherits the generator's state: without a seed, all workers would draw the same numbers.
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    # The kernel's thread id of the template, which debuggers and logs would show.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    # Directory listings of the template: files that were made since would not be found.
    importlib.invalidate_caches()


def _reset_modules() -> None:
    """Replace __main__ by a fresh one, and let our modules be imported again."""
    main = ModuleType("__main__")
    main.__loader__ = importlib.machinery.BuiltinImporter
    vars(main).update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # its name in multiprocessing
        sys.modules["__mp_main__"] = main
    for name in [name for name in sys.modules if name.split(".")[0] == "fastckpt_run"]:
        del sys.modules[name]
