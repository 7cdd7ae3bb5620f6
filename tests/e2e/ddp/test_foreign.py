"""A directory that something else wrote is no fresh start."""

from pathlib import Path

import pytest
import torch

from fastckpt import Checkpointer
from fastckpt.ddp import StorageType
from fastckpt.errors import NoLoadableCheckpoint
from tests.e2e.ddp.conftest import Ranks, state


@pytest.fixture
def theirs(directory: Path) -> Path:
    """What Flash Checkpoint left."""
    (directory / "100").mkdir(parents=True)
    torch.save(state(100), directory / "100/rank_0.pt")
    (directory / "dlrover_latest.txt").write_text("100")
    return directory


def test_a_foreign_checkpoint_is_refused_by_every_rank_with_a_way_to_load_it(ranks: Ranks, theirs: Path):
    ranks.start(2)

    def refused(member, rank):
        with pytest.raises(NoLoadableCheckpoint, match="Flash Checkpoint") as caught:
            member.load_checkpoint()
        return str(caught.value)

    one, other = ranks.together(refused)
    assert one == other and f"resume_path='{theirs}/100/rank_0.pt'" in one
    loaded = ranks.load(theirs / "100/rank_0.pt")
    assert all(torch.equal(each["weights"], state(100)["weights"]) for each in loaded)


def test_our_checkpoints_beside_a_foreign_one_are_loaded(ranks: Ranks, theirs: Path):
    (one,) = ranks.start()
    assert one.load_checkpoint(theirs / "100/rank_0.pt")["step"] == 100
    one.save_checkpoint(101, state(101), storage_type=StorageType.DISK)
    ranks.end()
    (one,) = ranks.start()
    assert one.load_checkpoint()["step"] == 101


def test_the_loop_api_refuses_a_foreign_checkpoint(theirs: Path):
    model = torch.nn.Linear(2, 2)
    with (
        Checkpointer(theirs, model=model) as checkpointer,
        pytest.raises(NoLoadableCheckpoint, match="Flash Checkpoint"),
    ):
        checkpointer.resume()


def test_logs_and_configurations_are_a_fresh_start(ranks: Ranks, directory: Path):
    for name in ("logs/events.out.tfevents.1", "config.yaml", "train.log", "checkpoint-1/notes.txt"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    (one,) = ranks.start()
    assert one.load_checkpoint() == {}
