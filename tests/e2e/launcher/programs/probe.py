"""Tell all that a script can see of the process that it runs in, as JSON in the file that PROBE names."""

import atexit
import gc
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

GLOBALS = {name: str(type(value)) for name, value in globals().items()}


class Kept:
    """An instance goes to a child of each start method and back."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.value == other.value

    def __hash__(self) -> int:
        return self.value


def double(kept: Kept) -> Kept:
    return Kept(2 * kept.value)


def children() -> dict[str, object]:
    told: dict[str, object] = {"method": multiprocessing.get_start_method(allow_none=True)}
    for method in os.environ.get("PROBE_METHODS", "").split():
        with multiprocessing.get_context(method).Pool(1) as pool:
            told[method] = (pool.map(double, [Kept(21)]) == [Kept(42)], pool.apply(os.getpid) != os.getpid())
    return told


def status() -> dict[str, str]:
    kept = re.compile("Sig[PBIC]|Shd|Cap|NoNewPrivs|Seccomp|Cpus_allowed|Umask|Groups|[UG]id|Name")
    lines = (line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: value.strip() for name, value in lines if kept.match(name)}


def streams() -> dict[str, object]:
    told: dict[str, object] = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        attributes = ("name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through", "closed")
        told[name] = {attribute: getattr(stream, attribute) for attribute in attributes} | {
            "same": stream is getattr(sys, f"__{name}__"),
            "descriptor": stream.fileno(),
            "terminal": stream.isatty(),
            "seekable": stream.seekable(),
            "buffer": [str(type(stream.buffer)), stream.buffer.name, stream.buffer.mode],
            "closes": getattr(stream.buffer, "raw", stream.buffer).closefd,
            "file": stat(stream.fileno()),
        }
    return told


def stat(descriptor: int) -> list[int]:
    found = os.fstat(descriptor)
    return [found.st_mode, found.st_dev]


def descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{name} {os.readlink(f'/proc/self/fd/{name}').split(':')[0]}")
        except FileNotFoundError:
            continue
    return sorted(found)


def interpreter() -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "flags": str(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "path": sys.path,
        "executable": [sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix, sys._base_executable],
        "globals": GLOBALS,
        "main": {
            name: str(getattr(main, name, "none"))
            for name in ("__name__", "__doc__", "__package__", "__file__", "__cached__", "__annotations__")
        },
        "loader": str(type(main.__loader__)) + getattr(main.__loader__, "path", ""),
        "spec": str(main.__spec__).replace(repr(main.__loader__), ""),
        "is_main": main.__dict__ is globals(),
        "builtins": str(type(globals()["__builtins__"])),
        "recursion": sys.getrecursionlimit(),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace() is None],
        "unraisable": sys.unraisablehook is sys.__unraisablehook__,
        "thread_hook": threading.excepthook is threading.__excepthook__,
        "last": [hasattr(sys, name) for name in ("last_type", "last_value", "last_traceback", "ps1")],
        "meta_path": [str(finder).partition(" at ")[0] for finder in sys.meta_path],
        "path_hooks": [hook.__qualname__ for hook in sys.path_hooks],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "switch": sys.getswitchinterval(),
        "encodings": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), sys.getdefaultencoding()],
        "dont_write": sys.dont_write_bytecode,
        "pycache": sys.pycache_prefix,
        "exc_info": [item is None for item in sys.exc_info()],
        "ours": sorted(name for name in sys.modules if name.startswith("fastckpt_run")),
        "modules": sorted(sys.modules) if "PROBE_TORCH" in os.environ else [],
        "filters": [str(found) for found in warnings.filters] if "PROBE_TORCH" in os.environ else [],
        "logging": [logging.root.level, len(logging.root.handlers)],
        "pickle": pickle.dumps(Kept(1)) == pickle.dumps(Kept(1)),
        "qualified": Kept.__module__,
        "import_self": importlib.import_module("__main__") is main,
    }


def process() -> dict[str, object]:
    current = multiprocessing.current_process()
    return {
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "parent": os.getppid() == int(os.environ["PROBE_PARENT"]),
        "folder": os.getcwd(),
        "environment": list(os.environ.items()),
        "kind": str(type(os.environ)),
        "c_environment": subprocess.run(["env"], check=True, capture_output=True, text=True).stdout,
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "shown_environment": Path("/proc/self/environ").read_text().split("\0"),
        "name": Path("/proc/self/comm").read_text(),
        "exe": os.readlink("/proc/self/exe"),
        "status": status(),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT")},
        "nice": [os.nice(0), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)],
        "handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "itimer": signal.getitimer(signal.ITIMER_REAL),
        "wakeup": signal.set_wakeup_fd(-1),
        "descriptors": descriptors(),
        "threads": [thread.name for thread in threading.enumerate()],
        "main_thread": threading.current_thread() is threading.main_thread(),
        "native": threading.get_native_id() == os.getpid() == threading.main_thread().native_id,
        "process": [current.name, current.daemon, multiprocessing.parent_process() is None, str(type(current))],
        "running": len(multiprocessing.active_children()),
        "key": len(current.authkey),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "death_signal": death_signal(),
    }


def death_signal() -> int:
    import ctypes

    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))
    return number.value


def torch_state() -> dict[str, object]:
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel
    from torch.utils.data import DataLoader

    import fastckpt.ddp  # noqa: F401

    seeded = torch.get_rng_state()[8:].any().item()
    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "launched": torch.distributed.is_torchelastic_launched(),
        "initialized": [
            torch.distributed.is_initialized(),
            torch.cuda.is_initialized(),
            torch.cuda._queued_calls == [],
        ],
        "state": [seeded, len(torch.get_rng_state())],
        "computed": (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item(),
        "loaded": [int(batch.sum()) for batch in DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork")],
    }


class Numbers:
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 3


def seeds() -> list[object]:
    """What must differ from process to process."""
    import numpy
    import torch

    key = bytes(multiprocessing.current_process().authkey).hex()
    return [random.random(), float(numpy.random.rand()), torch.initial_seed(), float(torch.rand(1)), key]


if __name__ == "__main__":
    told = {"interpreter": interpreter(), "process": process(), "streams": streams()}
    told["children"] = children()
    if "PROBE_STDIN" in os.environ:
        told["stdin"] = sys.stdin.read()
    if "PROBE_TORCH" in os.environ:
        told["torch"] = torch_state()
        told["differs"] = seeds()
        told["late"] = [sorted(sys.modules), [str(found) for found in warnings.filters]]
    Path(os.environ["PROBE"]).write_text(json.dumps(told))
    print("on stdout")
    print("on stderr", file=sys.stderr)
    os.write(1, b"raw\n")
    atexit.register(print, "first registered, last called")
    atexit.register(print, "last registered, first called")
    threading.Thread(target=lambda: print("a thread that is waited for")).start()
