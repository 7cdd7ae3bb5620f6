"""Processes that tests start look for no garbage while they import torch, nor among what they imported at their end.

Python's collector goes again and again through the half a million objects that torch makes then, and once more at exit:
a third of the time of a process that trains for a moment. What scripts make themselves is collected as ever.

With TEST_SLOW_DISK each sync of a file or a directory takes so many seconds longer, in each process of the tests:
whatever presumes the pace of the disk fails. With TEST_CALLS it is noted in that folder what each test calls.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

HEAVY = ("torch", "fastckpt", "fastckpt.ddp", "fastckpt_run.main")


def quickly(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute a module, whose objects, and those of all that it imports, will last as long as the process."""
    collects = gc.isenabled()
    gc.disable()
    try:
        execute(module)
    finally:
        gc.freeze()
        if collects:
            gc.enable()


class Finder:
    """Finds what the other finders find, to be executed quickly."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in HEAVY:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: quickly(execute, module)
        return spec


def slowed(sync: Callable[[int], None], seconds: float) -> Callable[[int], None]:
    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        sync(descriptor)

    return slow


sys.meta_path.insert(0, Finder())
if seconds := float(os.environ.get("TEST_SLOW_DISK", "0")):
    os.fsync, os.fdatasync = slowed(os.fsync, seconds), slowed(os.fdatasync, seconds)
if folder := os.environ.get("TEST_CALLS"):
    from benchmarks.mutants import calls

    calls.begin(folder)
