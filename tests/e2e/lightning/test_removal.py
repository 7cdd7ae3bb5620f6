"""What ModelCheckpoint asks to be removed is believed of the checkpoint directory, and of what this process saved."""

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.lineage import PASSED_OVER
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.unit._core.storage.checkpoints import ids, publish


@pytest.mark.frameworks
def test_paths_of_a_loaded_state_outside_and_what_a_resume_passed_over_are_left(tmp_path):
    from fastckpt.lightning.checkpoint_removal import Removal

    removal, directory, found = Removal(), CheckpointDirectory(tmp_path / "run"), list[str]()
    for step in (1, 2, 3):
        publish(directory, SaveId(1, step), **({PASSED_OVER: [[1, 1]]} if step == 3 else {}))
    (tmp_path / "thesis").mkdir()
    for path in (tmp_path / "thesis", f"{directory.path}/../thesis", directory.path / "epoch=1.ckpt", tmp_path / "run"):
        removal.remove(str(path))
    for step in (1, 2):
        removal.remove(str(directory.path / f"checkpoint-{step}"))
    removal.keep(str(tmp_path / "mine.ckpt"))  # saved there by this process
    removal.remove(str(tmp_path / "mine.ckpt"))
    for _ in range(2):
        removal.carry_out(str(directory.path), found.append, is_busy=False)
        assert found == [str(tmp_path / "mine.ckpt"), f"{directory.path}/epoch=1.ckpt"]
    assert ids(directory) == [(1, 3), (1, 1)]
