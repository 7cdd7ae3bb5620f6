"""Mapped images, of which forked children have none, and buffers: what passes one arrives complete and in order."""

import gc
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastckpt._core import huge_pages
from fastckpt._core.huge_pages import window
from fastckpt._core.transfer.device_copy import CopyPiece, batches
from fastckpt._core.transfer.image import Image

SIZE = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "model.pt"
    made.write_bytes(bytes(SIZE))
    return made


def in_child(work: Callable[[], bool]) -> bool:
    """What a forked child finds; it is to call nothing that needs another thread."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def maps(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_an_image_dropped_in_a_child_unmaps_nothing_of_the_child(path: Path):
    """Where the image was, the child may have something else by now."""
    image = Image(path)

    def lets_go() -> bool:
        nonlocal image
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        own = huge_pages._map(image.address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        lines = Path("/proc/self/maps").read_text
        is_there = own == image.address and f"{own:x}-" in lines()
        del image
        gc.collect()
        return is_there and f"{own:x}-" in lines()

    assert in_child(lets_go)
    image.close()


def test_a_forked_child_has_no_mapped_image_and_a_closed_one_cannot_be_written_to(path: Path):
    image = Image(path)
    view = image._mapping.view
    assert maps(path)
    assert in_child(lambda: not maps(path))
    image.close()
    assert not maps(path)
    with pytest.raises(ValueError, match="released"):
        view[0] = 1
    with path.open("rb") as file, window(file.fileno(), 0, SIZE):  # of a checkpoint that is being persisted
        assert maps(path)
        assert in_child(lambda: not maps(path))


def test_batches_contain_all_bytes_once_and_fit_the_buffer():
    for seed in range(100):
        random.seed(seed)
        room = random.randint(1, 50)
        sizes = [random.choice([0, 1, 7, room, room + 1, 3 * room + 2]) for _ in range(random.randint(0, 12))]
        target, pieces = 1000, []
        for size in sizes:
            pieces.append(CopyPiece(target, torch.arange(target, target + size, dtype=torch.int32).to(torch.uint8)))
            target += size + random.choice([0, 5])
        cut = list(batches(pieces, room))
        assert all(0 < sum(each.source.nbytes for each in batch) <= room for batch in cut)
        assert all(sum(each.source.nbytes for each in batch) == room for batch in cut[:-1])
        got = [(each.target + i, int(value)) for batch in cut for each in batch for i, value in enumerate(each.source)]
        assert got == [(each.target + i, (each.target + i) % 256) for each in pieces for i in range(each.source.nbytes)]
