"""A checkpoint directory that cannot be marked when it is first used: its memory counts all the same."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastckpt import StorageType
from fastckpt._core.memory.arena import arena_path
from fastckpt._core.memory.directory_claim import DirectoryClaim
from fastckpt._core.saver.persistence import directory_mark, persister
from fastckpt._core.storage.local.identity import identity
from tests.e2e.ddp.conftest import Ranks, state, until
from tests.e2e.ddp.test_nodes import Nodes
from tests.support.small_disks import mounted, unmount


def fill(directory: Path) -> Callable[[], None]:
    """Leave no room on the disk; what makes room again."""
    ballast = directory.parent / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while file.write(bytes(4096)):
            pass
    return ballast.unlink


MARK = ".fastckpt/identity"
MEMORY = StorageType.MEMORY


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that fails is given up after one attempt, and a mark is tried often."""
    monkeypatch.setattr(persister, "ATTEMPTS", 1)
    monkeypatch.setattr(directory_mark, "LONGEST_PAUSE", 0.1)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint directory on a disk of 1 MiB; skips where mounting is not permitted."""
    disk = mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs")
    (disk / "checkpoints").mkdir()
    yield disk / "checkpoints"
    unmount(disk)


@pytest.fixture
def jobs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Jobs that end before the disk is unmounted."""
    made = Ranks(directory, monkeypatch)
    yield made
    made.end()
    shutil.rmtree(arena(directory), ignore_errors=True)


def arena(directory: Path, node: int = 0) -> Path:
    return arena_path(os.environ["FASTCKPT_SHM_DIR"], os.path.realpath(directory), node)


def claim(directory: Path, node: int = 0) -> DirectoryClaim:
    return DirectoryClaim.read(arena(directory, node))


def resumed(jobs: Ranks) -> tuple[int, str]:
    (one,) = jobs.start()
    return one.load_checkpoint().get("step", 0), one.loaded_from


@pytest.mark.parametrize("torn", [None, "0123"])
def test_a_directory_that_cannot_be_marked_resumes_from_memory_and_is_marked_once_it_can(
    jobs: Ranks, directory: Path, torn: str | None
):
    """Whether it has no mark, or an incomplete one."""
    if torn is not None:
        (directory / ".fastckpt").mkdir()
        (directory / MARK).write_text(torn)
    permit = fill(directory)
    (one,) = jobs.start()
    assert one.load_checkpoint() == {} and one.save_checkpoint(3, state(3), storage_type=MEMORY)
    jobs.end()
    wanted = claim(directory).wanted
    assert identity(directory) == "" and claim(directory).due
    assert resumed(jobs) == (3, "memory")
    if torn is None:  # while the job runs
        permit()
        until(lambda: claim(directory).seen, "a mark")
    else:
        jobs.end()
        assert claim(directory).wanted == wanted
        permit()
        assert resumed(jobs) == (3, "memory")
    assert identity(directory) == claim(directory).seen and len(identity(directory)) == 32


def test_an_emptied_directory_is_a_fresh_start_with_a_warning(jobs: Ranks, directory: Path, said):
    (one,) = jobs.start()
    assert one.save_checkpoint(3, state(3), storage_type=MEMORY)
    before, kept = identity(directory), arena(directory).with_name("kept")
    shutil.copytree(arena(directory), kept)
    jobs.end()
    kept.rename(arena(directory))
    shutil.rmtree(directory)
    directory.mkdir()
    assert resumed(jobs) == (0, "")
    assert "discarding step 3 of history 1" in said.text and ": it is of another directory" in said.text
    assert identity(directory) not in ("", before)


def test_a_directory_emptied_while_in_use_is_not_marked_again_by_the_same_job(jobs: Ranks, directory: Path):
    (one,) = jobs.start()
    assert one.save_checkpoint(1, state(1), storage_type=MEMORY) and identity(directory)
    shutil.rmtree(directory / ".fastckpt")
    assert one.save_checkpoint(2, state(2), storage_type=MEMORY)
    jobs.end()
    assert identity(directory) == ""


def test_memory_of_all_nodes_counts_though_only_one_marked_the_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    subprocess.run(["mount", "-o", "remount,ro", str(directory.parent)], check=True)
    nodes = Nodes(directory, monkeypatch)
    nodes.start_nodes()
    nodes.load()
    nodes.save_to_memory(5, 0, 1)
    nodes.end()
    claims = [claim(directory, node) for node in (0, 1)]
    assert all(each.due for each in claims) and claims[0].wanted != claims[1].wanted
    subprocess.run(["mount", "-o", "remount,rw", str(directory.parent)], check=True)
    nodes.start_nodes()
    assert nodes.resume() == [(5, "memory")] * 2
    assert {claim(directory, node).seen for node in (0, 1)} == {identity(directory)}
    nodes.end()
    for node in (0, 1):
        shutil.rmtree(arena(directory, node), ignore_errors=True)


def test_at_a_url_one_node_writes_the_mark_and_the_others_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nodes = Nodes(f"memory://{tmp_path.name}/run", monkeypatch)
    nodes.start_nodes()
    nodes.load()
    paths = [member._writer.link.arena for member in nodes.members]
    until(lambda: not any(DirectoryClaim.read(path).due for path in paths), "both nodes know the mark")
    assert len({DirectoryClaim.read(path).seen for path in paths}) == 1
    nodes.end()
