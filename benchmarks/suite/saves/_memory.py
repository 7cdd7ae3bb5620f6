"""Samples of the memory of a job: private memory by process, shared memory, and the page cache of its files."""

import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psutil

PAUSE = 0.02
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Sample:
    """Memory of the job at one instant, in bytes.

    Attributes:
        at: Seconds of the monotonic clock, which all processes share.
        private: Anonymous memory by process id.
        shares: The same, where what forked processes have in common is divided among them.
        shared: Of the job's files in shared memory, or what its processes have mapped of others, if that is more.
        cached: Of the files of its checkpoint directory.
    """

    at: float
    private: dict[int, int]
    shares: dict[int, int]
    shared: int
    cached: int


def resident(pid: int) -> tuple[int, int, int]:
    """Anonymous memory of a process, its share of that, and its share of shared memory, in bytes; none if it has ended.

    Resident sizes count what is mapped twice as often, and what is forked in each process; shares do not.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0, 0
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines[1:])}
    return found.get("Anonymous", 0), found.get("Pss_Anon", 0), found.get("Pss_Shmem", 0)


def cached_of(path: Path) -> int:
    """Bytes of a file that are in the page cache; 0 if it is gone."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
            pages = -(-len(memory) // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * pages)()
            address = ctypes.c_void_p(_address(memory))
            if _LIBC.mincore(address, ctypes.c_size_t(len(memory)), found):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            return mmap.PAGESIZE * sum(value & 1 for value in bytes(found))
    except (FileNotFoundError, ValueError):  # removed meanwhile, or empty
        return 0


def _address(memory: mmap.mmap) -> int:
    """Return the address of a mapping that may not be written."""
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def taken(path: Path) -> int:
    """Bytes that a file takes; 0 if it is gone."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def files_of(folder: Path) -> list[Path]:
    """All files of a folder that others change meanwhile: what vanishes is left out, which ``rglob`` does not do."""
    return [Path(root, name) for root, _, names in os.walk(folder) for name in names]


class Sampler:
    """A thread that samples what this process has started.

    Args:
        shared: Directory of the job's files in shared memory.
        folder: The checkpoint directory.
    """

    def __init__(self, shared: Path, folder: Path) -> None:
        self.samples: list[Sample] = []
        self._shared, self._folder = shared, folder
        self._ended = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(PAUSE):
            at, pids = time.monotonic(), [each.pid for each in psutil.Process().children(recursive=True)]
            found = {pid: resident(pid) for pid in pids}
            private = {pid: anonymous for pid, (anonymous, _, _) in found.items()}
            shares = {pid: share for pid, (_, share, _) in found.items()}
            files = sum(taken(path) for path in files_of(self._shared))
            shared = max(files, sum(mapped for *_, mapped in found.values()))
            cached = sum(cached_of(path) for path in files_of(self._folder))
            self.samples.append(Sample(at, private, shares, shared, cached))
