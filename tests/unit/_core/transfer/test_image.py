"""Mapped images and forks: children have none of them, and harm nobody by that."""

import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastckpt import StorageType
from fastckpt._core import huge_pages
from fastckpt._core.huge_pages import window
from fastckpt._core.transfer.image import Image
from tests.e2e.ddp.conftest import Ranks, state

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


def maps(path: Path, pid: int | str = "self") -> bool:
    return str(path) in Path(f"/proc/{pid}/maps").read_text()


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


def test_a_forked_child_holds_no_mapping_of_a_checkpoint_being_persisted(path: Path):
    with path.open("rb") as file, window(file.fileno(), 0, SIZE):
        assert maps(path)
        assert in_child(lambda: not maps(path))


def test_replaced_images_are_not_kept_alive_by_a_data_loader_worker(ranks: Ranks):
    """It is forked between saves, and is still there when the state has grown."""
    (one,) = ranks.start()
    for step in (1, 2, 3):
        assert one.save_checkpoint(step, state(step), storage_type=StorageType.MEMORY)
    arena = one._writer.link.arena
    assert maps(arena)
    ours, theirs = os.pipe()
    loader = os.fork()
    if loader == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    try:
        for step in (4, 5, 6):
            assert one.save_checkpoint(
                step, {**state(step), "more": torch.ones(1 << 18)}, storage_type=StorageType.MEMORY
            )
        assert not maps(arena, loader)
        ours_now = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(arena) in line]
        assert ours_now and not any("(deleted)" in line for line in ours_now)
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(loader, 0)
    assert one.load_checkpoint()["step"] == 6
