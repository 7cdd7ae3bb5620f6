"""Limits: the least that a machine must do to move the bytes of a state, and nothing else."""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

BLOCK = 32 << 20


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def warm_memory(sources: Sequence[torch.Tensor], folder: str = "/dev/shm") -> Iterator[list[torch.Tensor]]:
    """Shared memory that is faulted in, cut as the sources are."""
    total = sum(source.numel() for source in sources)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(total)
        memory = mmap.mmap(file.fileno(), total, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        yield list(torch.split(whole, [source.numel() for source in sources]))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch's operations on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def all_cores() -> AbstractContextManager[None]:
    """torch's operations on as many threads as there are cores."""
    return torch_threads(os.cpu_count() or 1)


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def warm_copies(sources: Sequence[torch.Tensor], repeats: int) -> list[float]:
    """Seconds of copies of tensors of bytes into shared memory that is warm, on all cores."""
    with warm_memory(sources) as targets, all_cores():
        copy(targets, sources)
        return [seconds(lambda: copy(targets, sources)) for _ in range(repeats)]


def fresh_copy(sources: Sequence[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Seconds of a copy into memory that torch allocates for it, on all cores, and the copy."""
    held: list[torch.Tensor] = []
    with all_cores():
        return seconds(lambda: held.extend(torch.empty_like(s).copy_(s) for s in sources)), held


def bare_write(image: Path, path: Path) -> float:
    """Seconds of a write of a file's bytes from its mapping, with O_DIRECT and fdatasync, to a new file."""
    size = image.stat().st_size
    source = os.open(image, os.O_RDONLY)
    memory = memoryview(mmap.mmap(source, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)

    def write() -> None:
        for offset in range(0, size, BLOCK):
            os.pwrite(fd, memory[offset : offset + BLOCK], offset)
        os.fdatasync(fd)

    try:
        return seconds(write)
    finally:
        os.close(source)
        os.close(fd)
        path.unlink()
