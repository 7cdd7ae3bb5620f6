"""The checks of a node by itself: which there are, in which order, and with which sizes."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastckpt._core.config import LARGE_FILES, Settings, copy_of_environment
from fastckpt._core.policy.node_check import DEFAULT_LIMITS, CheckLimits, CheckResult
from fastckpt_run.node_check.check_process import CheckProcess

KINDS = ("shm", "disk", "memory", "loopback", "matmul")
"""Kinds of checks, in the order in which they run: first those that do not need torch."""
DEADLINE = 30.0
"""Seconds that one check may take, which takes one or two."""
_MIB = 1 << 20
_SIZES = {"cpu": 512, "cuda": 4096}
"""Rows of the matrices by the kind of device."""
_DTYPES = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}


@dataclass(frozen=True)
class LocalChecks:
    """The checks of a node by itself.

    Attributes:
        shm_dir: The directory of arenas.
        in_memory: True if that has to be a tmpfs.
        directories: Directories to which files are written: checkpoint directories, or one for temporary files.
        kinds: Kinds of checks, of `KINDS`.
        limits: Limits that values have to reach.
        deadline: Seconds that one check may take.
        budget: Seconds after which no further one is begun.
        seconds: Duration of the measurement of a rate.
    """

    shm_dir: str
    in_memory: bool
    directories: Sequence[str]
    kinds: Sequence[str] = KINDS
    limits: CheckLimits = DEFAULT_LIMITS
    deadline: float = DEADLINE
    budget: float = math.inf
    seconds: float = 0.5

    @classmethod
    def of(cls, settings: Settings, directories: Sequence[str] = (), **options: Any) -> "LocalChecks":
        """The checks for a job with these settings; without directories, in that for temporary files."""
        return cls(settings.arenas, settings.memory, list(directories) or [temporary_directory()], **options)

    def run(self, report: Callable[[CheckResult], None] = lambda _: None) -> list[CheckResult]:
        """Run them one after the other in a child process; ``report`` gets each result when it is there."""
        found, end = list[CheckResult](), time.monotonic() + self.budget
        with CheckProcess(self.deadline) as process:
            for result in self._results(process):
                found.append(self.limits.apply(result))
                report(found[-1])
                if time.monotonic() > end:
                    break
        return found

    def _results(self, process: CheckProcess) -> Iterator[CheckResult]:
        for request in self._requests():
            yield process.run(request)
        if "matmul" not in self.kinds:
            return
        devices = process.devices()
        if isinstance(devices, CheckResult):
            yield devices
            return
        for device in devices:
            kind = device.partition(":")[0]
            for dtype in _DTYPES[kind]:
                name = f"matmul {device}" + (f" {dtype}" if len(_DTYPES[kind]) > 1 else "")
                sizes = {"size": _SIZES[kind], "seconds": self.seconds}
                yield process.run({"check": "matmul", "name": name, "device": device, "dtype": dtype, **sizes})

    def _requests(self) -> Iterator[dict[str, Any]]:
        if "shm" in self.kinds:
            where = {"directory": self.shm_dir, "in_memory": self.in_memory}
            yield {"check": "shm", "name": "shm", **where, "size": 16 * _MIB}
        if "disk" in self.kinds:
            for directory in self.directories:
                name = f"disk {directory}"
                bounds = {"size": 32 * _MIB, "seconds": 2 * self.seconds}
                yield {"check": "disk", "name": name, "directory": directory, **bounds}
        if "memory" in self.kinds:
            yield {"check": "memory", "name": "memory", "size": 64 * _MIB, "seconds": self.seconds}
        if "loopback" in self.kinds:
            yield {"check": "loopback", "name": "loopback", "seconds": self.deadline / 2}


def temporary_directory() -> str:
    """The directory for large temporary files."""
    return copy_of_environment().get("TMPDIR") or LARGE_FILES
