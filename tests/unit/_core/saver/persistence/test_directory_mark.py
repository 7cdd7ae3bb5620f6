"""A checkpoint directory that cannot be marked when it is first used: its memory counts all the same."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt import StorageType
from fastckpt._core.memory.arena import arena_path
from fastckpt._core.memory.directory_claim import DirectoryClaim
from fastckpt._core.saver.persistence import directory_mark, persister
from fastckpt._core.storage.local.identity import identity
from tests.e2e.ddp.conftest import Ranks, state, until
from tests.e2e.ddp.test_nodes import Nodes

MARK = ".fastckpt/identity"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that fails is given up after one attempt, and a mark is tried often."""
    monkeypatch.setattr(persister, "ATTEMPTS", 1)
    monkeypatch.setattr(directory_mark, "LONGEST_PAUSE", 0.5)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint directory on a disk of 1 MiB; skips where mounting is not permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    (disk / "checkpoints").mkdir()
    yield disk / "checkpoints"
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def jobs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Jobs that end before the disk is unmounted."""
    made = Ranks(directory, monkeypatch)
    yield made
    made.end()
    shutil.rmtree(arena(directory), ignore_errors=True)


def arena(directory: Path, node: int = 0) -> Path:
    return arena_path(os.environ["FASTCKPT_SHM_DIR"], os.path.realpath(directory), node)


def fill(directory: Path) -> Path:
    """Leave no room on the disk."""
    ballast = directory.parent / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while file.write(bytes(4096)):
            pass
    return ballast


def saved_in_vain(jobs: Ranks) -> None:
    """A job of one step, whose end cannot persist it."""
    (one,) = jobs.start()
    assert one.load_checkpoint() == {} and one.save_checkpoint(3, state(3), storage_type=StorageType.MEMORY)
    jobs.end()


def resumed(jobs: Ranks) -> tuple[int, str]:
    (one,) = jobs.start()
    return one.load_checkpoint().get("step", 0), one.loaded_from


def test_a_directory_full_at_the_first_start_resumes_once_there_is_space(jobs: Ranks, directory: Path):
    ballast = fill(directory)
    saved_in_vain(jobs)
    assert identity(directory) == "" and DirectoryClaim.read(arena(directory)).due
    ballast.unlink()
    assert resumed(jobs) == (3, "memory")
    assert identity(directory) == DirectoryClaim.read(arena(directory)).seen != ""


def test_a_directory_full_at_later_starts_resumes_from_memory(jobs: Ranks, directory: Path):
    fill(directory)
    saved_in_vain(jobs)
    wanted = DirectoryClaim.read(arena(directory)).wanted
    for _ in range(2):
        assert resumed(jobs) == (3, "memory")
        jobs.end()
        assert DirectoryClaim.read(arena(directory)).wanted == wanted


def test_a_directory_read_only_at_the_first_start_resumes_from_memory(jobs: Ranks, directory: Path):
    subprocess.run(["mount", "-o", "remount,ro", str(directory.parent)], check=True)
    saved_in_vain(jobs)
    subprocess.run(["mount", "-o", "remount,rw", str(directory.parent)], check=True)
    assert resumed(jobs) == (3, "memory")


def test_a_directory_is_marked_as_soon_as_it_is_writable(jobs: Ranks, directory: Path):
    ballast = fill(directory)
    (one,) = jobs.start()
    assert one.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY) and identity(directory) == ""
    ballast.unlink()
    until(lambda: DirectoryClaim.read(arena(directory)).seen, "a mark")
    assert identity(directory) == DirectoryClaim.read(arena(directory)).seen


@pytest.mark.parametrize("torn", ["", "0123"])
def test_an_incomplete_mark_of_a_directory_is_replaced(jobs: Ranks, directory: Path, torn: str):
    (directory / ".fastckpt").mkdir()
    (directory / MARK).write_text(torn)
    ballast = fill(directory)
    saved_in_vain(jobs)
    ballast.unlink()
    assert resumed(jobs) == (3, "memory")
    assert len(identity(directory)) == 32


def test_an_emptied_directory_is_a_fresh_start_with_a_warning(jobs: Ranks, directory: Path, said):
    (one,) = jobs.start()
    assert one.save_checkpoint(3, state(3), storage_type=StorageType.MEMORY)
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
    """What was marked once is not marked again by the same job."""
    (one,) = jobs.start()
    assert one.save_checkpoint(1, state(1), storage_type=StorageType.MEMORY) and identity(directory)
    shutil.rmtree(directory / ".fastckpt")
    assert one.save_checkpoint(2, state(2), storage_type=StorageType.MEMORY)
    jobs.end()
    assert identity(directory) == ""


def test_a_directory_recreated_before_it_was_marked_is_another_one(jobs: Ranks, directory: Path, said):
    ballast = fill(directory)
    saved_in_vain(jobs)
    ballast.unlink()
    aside = directory.rename(directory.with_name("aside"))  # else its inode might come again
    directory.mkdir()
    assert resumed(jobs) == (0, "")
    assert "discarding" in said.text and ": it is of another directory" in said.text
    shutil.rmtree(aside)


def of_an_earlier_version(directory: Path, mark: str) -> None:
    """What a version without claims would have left in the arena."""
    (arena(directory) / "claim").unlink()
    (arena(directory) / "identity").write_text(mark)


@pytest.mark.parametrize(
    ("in_memory", "in_directory", "found"),
    [
        ("1" * 32, "1" * 32, (3, "memory")),
        ("1" * 32, "2" * 32, (0, "")),
        ("1" * 32, "", (0, "")),
        ("", "", (3, "memory")),
        ("", "1" * 32, (0, "")),
    ],
)
def test_memory_of_an_earlier_version_without_a_mark_is_resumed(
    jobs: Ranks, directory: Path, in_memory: str, in_directory: str, found: tuple[int, str]
):
    ballast = fill(directory)
    saved_in_vain(jobs)
    ballast.unlink()
    of_an_earlier_version(directory, in_memory)
    if in_directory:
        (directory / ".fastckpt").mkdir(exist_ok=True)
        (directory / MARK).write_text(in_directory)
    assert resumed(jobs) == found


def test_memory_of_all_nodes_counts_though_only_one_marked_the_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    ballast = fill(directory)
    nodes = Nodes(directory, monkeypatch)
    nodes.start_nodes()
    nodes.load()
    nodes.save_to_memory(5, 0, 1)
    nodes.end()
    claims = [DirectoryClaim.read(arena(directory, node)) for node in (0, 1)]
    assert all(claim.due for claim in claims) and claims[0].wanted != claims[1].wanted
    ballast.unlink()
    nodes.start_nodes()
    assert nodes.resume() == [(5, "memory")] * 2
    assert {DirectoryClaim.read(arena(directory, node)).seen for node in (0, 1)} == {identity(directory)}
    nodes.end()
    for node in (0, 1):
        shutil.rmtree(arena(directory, node), ignore_errors=True)


def test_at_a_url_one_node_writes_the_mark_and_the_others_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    location = f"memory://{tmp_path.name}/run"
    nodes = Nodes(location, monkeypatch)
    nodes.start_nodes()
    nodes.load()
    paths = [member._writer.link.arena for member in nodes.members]
    until(lambda: not any(DirectoryClaim.read(path).due for path in paths), "both nodes know the mark")
    assert len({DirectoryClaim.read(path).seen for path in paths}) == 1
    nodes.end()
