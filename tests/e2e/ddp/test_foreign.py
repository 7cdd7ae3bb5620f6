"""A directory that something else wrote is no fresh start."""

from pathlib import Path

import pytest
import torch

from fastckpt.ddp import StorageType
from tests.e2e.ddp.conftest import state


@pytest.fixture
def theirs(directory: Path) -> Path:
    """What Flash Checkpoint left."""
    (directory / "100").mkdir(parents=True)
    torch.save(state(100), directory / "100/rank_0.pt")
    (directory / "dlrover_latest.txt").write_text("100")
    return directory


def test_a_foreign_checkpoint_is_refused_by_every_rank_with_a_way_to_load_it(ranks, theirs):
    ranks.start(2)
    one, other = ranks.refusals()
    assert one == other and "Flash Checkpoint" in one and f"resume_path='{theirs}/100/rank_0.pt'" in one
    loaded = ranks.load(theirs / "100/rank_0.pt")
    assert all(torch.equal(each["weights"], state(100)["weights"]) for each in loaded)
    for member in ranks.members:
        member.save_checkpoint(101, state(101), storage_type=StorageType.DISK)
    ranks.end()
    ranks.start(2)
    assert ranks.resume() == [(101, "storage")] * 2, "our own beside it is loaded"


def test_logs_and_configurations_are_a_fresh_start(ranks, directory):
    for name in ("logs/events.out.tfevents.1", "config.yaml", "train.log", "checkpoint-1/notes.txt"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    (one,) = ranks.start()
    assert one.load_checkpoint() == {}
    assert (one.loaded_step, one.loaded_from, one.rank_state) == (-1, "", {})
