"""Checkpoints of a real job, damaged in each way that a disk or a person can, and resumed by real processes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.conftest import PATH
from tests.faults.diary import digest
from tests.faults.jobs import Job
from tests.support.live_folders import remove_live
from tests.support.ports import free_port

HERE = Path(__file__).parent


class Resumers:
    """Two ranks that resume from directories."""

    def __init__(self, shm: Path) -> None:
        # Root may read all files; these may read what their modes let them, so that some cannot be read.
        as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
        alone = ["unshare", "--mount", "--propagation", "private", *as_others]
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        environment = os.environ | world | {"FASTCKPT_SHM_DIR": str(shm), "PYTHONPATH": PATH}
        store = f"tcp://127.0.0.1:{free_port()}"
        self._ranks = [
            subprocess.Popen(
                [*alone, sys.executable, str(HERE / "resumer.py"), store],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip

    def __call__(self, directory: Path, over: dict[Path, Path] | None = None) -> list[dict[str, Any]]:
        """What each rank says of its resume; rank 1 sees other files in the place of some."""
        for rank, process in enumerate(self._ranks):
            others = {str(path): str(other) for path, other in (over or {}).items()} if rank == 1 else {}
            assert process.stdin
            process.stdin.write(json.dumps({"directory": str(directory), "over": others}) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self._ranks if process.stdout]

    def end(self) -> None:
        for process in self._ranks:
            process.communicate(timeout=60)
            assert process.returncode == 0


@pytest.fixture(scope="module")
def resumers() -> Iterator[Resumers]:
    if subprocess.run(["unshare", "--mount", "setpriv", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to have mounts of its own")
    shm = Path(tempfile.mkdtemp(prefix="fastckpt-resumers-", dir="/dev/shm"))
    started = Resumers(shm)
    yield started
    started.end()
    left = list(shm.iterdir())
    remove_live(shm)
    assert not left


class Expected:
    """What a step holds, as a plain torch.load of the undamaged checkpoint tells.

    Attributes:
        steps: Those that are on storage, newest first: a job on a busy machine skips some.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.steps = sorted((int(path.name[11:]) for path in directory.glob("checkpoint-*")), reverse=True)
        assert len(self.steps) >= 2

    def __call__(self, step: int) -> list[tuple[int, str, str]]:
        place = self.directory / f"checkpoint-{step}"
        state = digest(torch.load(place / "model.pt"))
        return [(step, state, digest(torch.load(place / f"rank_{rank}.pt")["state"])) for rank in (0, 1)]


@pytest.fixture
def expected(uninterrupted: Callable[..., Job]) -> Expected:
    return Expected(uninterrupted().checkpoint_dir)


@pytest.fixture
def directory(uninterrupted: Callable[..., Job], tmp_path: Path) -> Path:
    """The checkpoints of a job of 60 steps, to be damaged."""
    return shutil.copytree(uninterrupted().checkpoint_dir, tmp_path / "checkpoints", symlinks=True)


def found(answers: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    return [(answer["step"], answer["state"], answer["own"]) for answer in answers]


def flip(path: Path, where: float = 0.5) -> None:
    """One bit, as a disk does it: size and times stay."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(int((times.st_size - 1) * where))
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x20]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


DAMAGE: dict[tuple[str, str], Callable[[Path], None]] = {
    ("flipped at its beginning", "model.pt"): lambda path: flip(path, 0),
    ("flipped at its end", "rank_0.pt"): lambda path: flip(path, 1),
    ("truncated", "manifest.json"): lambda path: os.truncate(path, path.stat().st_size // 2),
    ("longer", "model.pt"): lambda path: os.truncate(path, path.stat().st_size + 1),
    ("missing", "rank_1.pt"): Path.unlink,
    ("missing", "manifest.json"): Path.unlink,
}


@pytest.mark.parametrize(("damage", "name"), DAMAGE)
def test_a_damaged_file_makes_all_ranks_fall_back_to_the_step_before(resumers, expected, directory, name, damage):
    newest, last = expected.steps[:2]
    place = directory / f"checkpoint-{newest}"
    before = {path.name: path.stat().st_ino for path in place.iterdir()}
    DAMAGE[damage, name](place / name)
    answers = resumers(directory)
    assert found(answers) == expected(last)
    assert str(place) in answers[0]["log"]
    if (damage, name) == ("missing", "manifest.json"):  # then it may be somebody else's: it is not moved
        assert place.exists() and "has no manifest" in answers[0]["log"]
        return
    [(aside, why)] = CheckpointDirectory(directory).scan().quarantined
    assert not place.exists() and name in why
    left = {path.name: path.stat().st_ino for path in aside.iterdir() if path.name != "why.txt"}
    assert {n: inode for n, inode in before.items() if n != name}.items() <= left.items()
    assert found(resumers(directory)) == expected(last)  # the next launch, too


def test_a_file_that_may_not_be_read_is_an_error_on_all_ranks_and_loads_once_it_may(resumers, expected, directory):
    """An expired ticket of a network file system looks like this, too: it says nothing of the bytes."""
    file = directory / f"checkpoint-{expected.steps[0]}" / "rank_1.pt"
    file.chmod(0)
    first, second = resumers(directory)
    assert first["error"] == second["error"] and first["error"].startswith("NoLoadableCheckpoint")
    assert f"{file} cannot be read now: Permission denied. Give this user the right to read it" in first["error"]
    file.chmod(0o600)
    assert found(resumers(directory)) == expected(expected.steps[0])


def test_damage_that_one_rank_alone_sees_is_applied_by_none_and_not_quarantined(
    resumers, expected, directory, tmp_path
):
    """Its mount shows it another file: nobody applies the checkpoint, and nobody moves it."""
    newest, last = expected.steps[:2]
    path = directory / f"checkpoint-{newest}" / "rank_1.pt"
    shutil.copy(path, tmp_path / "other")
    flip(tmp_path / "other")
    answers = resumers(directory, over={path: tmp_path / "other"})
    assert found(answers) == expected(last)
    assert path.exists() and CheckpointDirectory(directory).scan().quarantined == []
    assert found(resumers(directory)) == expected(newest)  # when that is mended
