"""`fastckpt prune`: deletion of checkpoints that no option keeps, after a confirmation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local import removal
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.stored import Stored
from tests.cli import harm
from tests.cli.conftest import publish, quarantine

TEN = list(range(100, 0, -10))


@pytest.fixture(scope="module")
def ten(tmp_path_factory) -> Path:
    """Steps 10 to 100; the loss is best at 40 and 50, the accuracy at 70."""
    directory = tmp_path_factory.mktemp("ten") / "run"
    for step in reversed(TEN):
        metrics = {"loss": abs(step - 44) / 10, "accuracy": 1 - abs(step - 70) / 100}
        publish(directory, step, details={"metrics": metrics})
    return directory


def steps(directory: Path) -> list[int]:
    return [stored.id.step for stored in CheckpointDirectory(directory).checkpoints()]


def test_prune_keeps_what_its_options_keep(fastckpt, ten):
    for options, kept in (
        ("--keep-every 30", [100, 90, 60, 30]),
        ("--keep-minutes 100000", [100, 10]),  # the first of the period, and the newest
        ("--keep-best 2:loss", [100, 50, 40]),
        ("--keep-best 1:accuracy:max", [100, 70]),
        ("--keep-last 1 --keep-every 50 --keep-best 1:loss", [100, 50, 40]),
    ):
        dry = fastckpt("prune", ten, *options.split(), "--json").document
        assert steps(ten) == TEN and not dry["done"]
        assert [item["step"] for item in dry["keep"]] == kept
        assert [item["step"] for item in dry["delete"]] == [step for step in TEN if step not in kept]


def test_prune_with_yes_deletes_what_it_planned_without(fastckpt, three):
    assert "no metrics" in fastckpt("prune", three, "--keep-best", "1:loss", "--yes").err
    assert "--yes" in fastckpt("prune", three, "--keep-last", "2").out and steps(three) == [30, 20, 10]
    done = fastckpt("prune", three, "--keep-last", "2", "--yes", "--json").document
    assert done["done"] and done["freed"] == sum(item["size"] for item in done["delete"]) > 0
    assert steps(three) == [30, 20] and fastckpt("verify", three, "--all").code == 0
    assert "1 deleted" in fastckpt("prune", three, "--keep-last", "1", "--yes").out
    assert fastckpt("prune", three, "--keep-last", "1", "--json").document["delete"] == []


def test_wrong_usage_of_prune_deletes_nothing(fastckpt, ten):
    for options, why in (
        ("", "rror"),
        ("--keep-last 0", "rror"),
        ("--keep-minutes nan", "rror"),
        ("--keep-best x:loss", "rror"),
        ("--keep-best 2:", "rror"),
        ("--keep-best 3:val_loss", "accuracy, loss"),  # a typo would delete all but the newest
        ("--keep-best 3:val_loss --keep-last 2", "'val_loss'"),
        ("--drop-history 1", "newest"),
        ("--drop-history 7", "[1]"),
    ):
        said = fastckpt("prune", ten, *options.split(), "--yes")
        assert said.code == 2 and why in said.err and not said.out, options
        assert steps(ten) == TEN


def test_prune_leaves_bad_checkpoints_and_files_outside_the_directory_alone(fastckpt, three, tmp_path):
    publish(three, 4, target=str(tmp_path / "best.pt"))
    publish(three, 5, target=str(three / "best.pt"))
    publish(three, 40, world_size=2)  # without the files of the second rank
    harm.truncate(three / "checkpoint-30/model.pt")
    quarantine(three, 10)
    fastckpt("prune", three, "--keep-last", "1", "--yes")
    assert (tmp_path / "best.pt").exists() and not (three / "best.pt").exists()
    assert steps(three) == [20] and all((three / f"checkpoint-{step}").exists() for step in (30, 40))
    assert len(list(three.glob(".fastckpt/quarantine-*"))) == 1


def test_prune_works_beside_a_running_job(fastckpt, three):
    with DdpCheckpointer(three) as checkpointer:
        checkpointer.save_checkpoint(40, {"x": 1}, storage_type=StorageType.MEMORY)
        document = fastckpt("prune", three, "--keep-last", "1", "--yes", "--json").document
        assert [job["arena"] for job in document["jobs"]] and steps(three)[-1] == 30
        assert "in use by process" in fastckpt("prune", three, "--keep-last", "1").out
    assert steps(three) == [40, 30]  # the last flush


def test_a_step_published_again_during_prune_is_kept(fastckpt, three, monkeypatch):
    """A job saves step 20 again after a rollback, and deletes step 10, just when these are about to be deleted."""
    delete = removal.delete

    def delete_too_late(layout: Layout, stored: Stored, is_replaced: Callable[[], bool]) -> None:
        if stored.id.step == 20:
            publish(three, 20, history=2, state={"w": torch.ones(3)})
        else:
            delete(layout, stored, is_replaced)
        delete(layout, stored, is_replaced)

    monkeypatch.setattr(removal, "delete", delete_too_late)
    assert fastckpt("prune", three, "--keep-every", "15", "--yes").code == 0
    stored = CheckpointDirectory(three).checkpoints()
    assert [one.id for one in stored] == [(2, 20), (1, 30)]
    assert fastckpt("verify", three, "--all").code == 0
    assert [path.name for path in three.glob(".fastckpt/*") if path.name.startswith(("retired", "deleted"))] == []


@pytest.mark.parametrize(
    ("later", "option", "kept"),
    [
        ({"step": 2}, "--keep-last", [2, 30]),  # each line of training by itself
        ({"step": 2}, "--drop-history", [2]),
        ({"step": 15, "parent": SaveId(1, 10)}, "--keep-last", [15]),  # newer than 30, after a rollback
    ],
    ids=["not loaded", "dropped", "rolled back"],
)
def test_histories_that_the_newest_resumed_from_are_one_line(fastckpt, three, later, option, kept):
    publish(three, history=2, **later)
    assert fastckpt("prune", three, option, "1", "--yes").code == 0
    assert steps(three) == kept
