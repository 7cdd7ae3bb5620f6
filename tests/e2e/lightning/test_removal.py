"""What ModelCheckpoint asks to be removed is believed of the checkpoint directory, and of what this process saved."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.lineage import PASSED_OVER
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.unit._core.storage.checkpoints import ids, publish

pytestmark = pytest.mark.frameworks


@pytest.fixture
def removal():
    from fastckpt.lightning.checkpoint_removal import Removal

    return Removal()


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    directory = CheckpointDirectory(tmp_path / "run")
    for step in (1, 2, 3):
        publish(directory, SaveId(1, step), **({PASSED_OVER: [[1, 1]]} if step == 3 else {}))
    return directory


def removed(removal, directory: CheckpointDirectory) -> list[str]:
    found = list[str]()
    remove: Callable[[str], None] = found.append
    removal.carry_out(str(directory.path), remove, is_busy=False)
    return found


def test_paths_of_a_loaded_state_outside_are_left(removal, directory, tmp_path):
    (tmp_path / "thesis").mkdir()
    for path in (tmp_path / "thesis", f"{directory.path}/../thesis", directory.path / "epoch=1.ckpt", tmp_path / "run"):
        removal.remove(str(path))
    removal.keep(str(tmp_path / "mine.ckpt"))  # saved there by this process
    removal.remove(str(tmp_path / "mine.ckpt"))
    assert removed(removal, directory) == [str(tmp_path / "mine.ckpt"), f"{directory.path}/epoch=1.ckpt"]
    assert removed(removal, directory) == []


def test_what_a_resume_passed_over_is_not_removed(removal, directory):
    for step in (1, 2):
        removal.remove(str(directory.path / f"checkpoint-{step}"))
    assert removed(removal, directory) == [] and ids(directory) == [(1, 3), (1, 1)]
