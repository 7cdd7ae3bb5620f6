"""`fastckpt prune`: deletion of checkpoints that no option keeps, after a confirmation."""

import re
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
from tests.cli.conftest import Fastckpt, publish


@pytest.fixture
def ten(directory: Path) -> Path:
    """Steps 10 to 100; the loss is best at 40 and 50, the accuracy at 70."""
    for step in range(10, 101, 10):
        metrics = {"loss": abs(step - 44) / 10, "accuracy": 1 - abs(step - 70) / 100}
        publish(directory, step, details={"metrics": metrics})
    return directory


def steps(directory: Path) -> list[int]:
    return [stored.id.step for stored in CheckpointDirectory(directory).checkpoints()]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep-last", "2"], [100, 90]),
        (["--keep-every", "30"], [100, 90, 60, 30]),
        (["--keep-best", "2:loss"], [100, 50, 40]),
        (["--keep-best", "1:accuracy:max"], [100, 70]),
        (["--keep-best", "1:accuracy:min"], [100, 10]),
        (["--keep-last", "1", "--keep-every", "50", "--keep-best", "1:loss"], [100, 50, 40]),
        (["--keep-last", "99"], list(range(100, 0, -10))),
    ],
)
def test_prune_keeps_what_its_options_keep(fastckpt: Fastckpt, ten: Path, options: list[str], kept: list[int]):
    before = steps(ten)
    dry = fastckpt("prune", ten, *options, "--json").document
    assert steps(ten) == before and not dry["done"]
    assert [item["step"] for item in dry["keep"]] == kept
    assert [item["step"] for item in dry["delete"]] == [step for step in before if step not in kept]
    done = fastckpt("prune", ten, *options, "--yes", "--json").document
    assert done["done"] and done["freed"] == sum(item["size"] for item in done["delete"])
    assert steps(ten) == kept
    assert fastckpt("verify", ten, "--all").code == 0
    assert fastckpt("prune", ten, *options, "--json").document["delete"] == []


def test_prune_keeps_one_checkpoint_per_interval_of_minutes(fastckpt: Fastckpt, ten: Path):
    assert fastckpt("prune", ten, "--keep-minutes", "100000", "--yes").code == 0
    assert steps(ten) == [100, 10]  # the first of the period, and the newest


def test_without_yes_prune_prints_a_plan_and_deletes_nothing(fastckpt: Fastckpt, three: Path):
    lines = [line.split() for line in fastckpt("prune", three, "--keep-last", "1").out.splitlines()]
    assert [(line[0], line[4]) for line in lines[1:4]] == [("30", "keep"), ("20", "delete"), ("10", "delete")]
    assert "--yes" in lines[4] or "--yes deletes" in " ".join(lines[4])
    assert "2 deleted" in fastckpt("prune", three, "--keep-last", "1", "--yes").out


@pytest.mark.parametrize(
    "options",
    [[], ["--yes"], ["--keep-last", "0"], ["--keep-every", "-1"], ["--keep-minutes", "nan"], ["--keep-best", "loss"],
     ["--keep-best", "0:loss"], ["--keep-best", "x:loss"], ["--keep-best", "2:"]],
)  # fmt: skip
def test_wrong_usage_of_prune_deletes_nothing(fastckpt: Fastckpt, three: Path, options: list[str]):
    said = fastckpt("prune", three, *options, "--yes")
    assert said.code == 2 and "error" in said.err.lower() and not said.out
    assert steps(three) == [30, 20, 10]


def test_prune_leaves_bad_checkpoints_alone(fastckpt: Fastckpt, three: Path):
    harm.truncate(three / "checkpoint-30/model.pt")
    store = CheckpointDirectory(three)
    store.quarantine(next(stored for stored in store.checkpoints() if stored.id.step == 10), "bad")
    assert fastckpt("prune", three, "--keep-last", "1", "--yes", "--json").document["delete"] == []
    assert steps(three) == [20] and (three / "checkpoint-30").exists()
    assert len(list(three.glob(".fastckpt/quarantine-*"))) == 1


def test_prune_orders_checkpoints_by_history_before_step(fastckpt: Fastckpt, three: Path):
    """After a rollback to 10, step 15 of the new history is newer than 30 of the old one."""
    publish(three, 15, history=2, parent=SaveId(1, 10))
    fastckpt("prune", three, "--keep-last", "1", "--yes")
    assert steps(three) == [15]


def test_prune_deletes_files_at_paths_of_the_user_in_the_directory_alone(
    fastckpt: Fastckpt, three: Path, tmp_path: Path
):
    publish(three, 4, target=str(tmp_path / "best.pt"))
    publish(three, 5, target=str(three / "best.pt"))
    fastckpt("prune", three, "--keep-last", "2", "--yes")
    assert (tmp_path / "best.pt").exists() and not (three / "best.pt").exists() and steps(three) == [30, 20]


def test_prune_works_beside_a_running_job(fastckpt: Fastckpt, three: Path):
    with DdpCheckpointer(three) as checkpointer:
        checkpointer.save_checkpoint(40, {"x": 1}, storage_type=StorageType.MEMORY)
        document = fastckpt("prune", three, "--keep-last", "1", "--yes", "--json").document
        assert [job["arena"] for job in document["jobs"]] and steps(three)[-1] == 30
        assert "in use by process" in fastckpt("prune", three, "--keep-last", "1").out
    assert steps(three) == [40, 30]  # the last flush


def test_a_step_published_again_during_prune_is_kept(fastckpt: Fastckpt, three: Path, monkeypatch):
    """A job that was rolled back saves step 20 again, just when the old step 20 is about to be deleted."""
    delete = removal.delete

    def delete_too_late(layout: Layout, stored: Stored, is_replaced: Callable[[], bool]) -> None:
        publish(three, stored.id.step, history=2, state={"w": torch.ones(3)})
        delete(layout, stored, is_replaced)

    monkeypatch.setattr(removal, "delete", delete_too_late)
    assert fastckpt("prune", three, "--keep-every", "15", "--yes").code == 0
    stored = CheckpointDirectory(three).checkpoints()
    assert [one.id for one in stored] == [(2, 20), (2, 10), (1, 30)]
    assert fastckpt("verify", three, "--all").code == 0
    assert [path.name for path in three.glob(".fastckpt/*") if path.name.startswith(("retired", "deleted"))] == []


def test_a_checkpoint_deleted_by_its_job_during_prune_is_no_error(fastckpt: Fastckpt, three: Path, monkeypatch):
    delete = removal.delete

    def delete_twice(layout: Layout, stored: Stored, is_replaced: Callable[[], bool]) -> None:
        delete(layout, stored, is_replaced)
        delete(layout, stored, is_replaced)

    monkeypatch.setattr(removal, "delete", delete_twice)
    said = fastckpt("prune", three, "--keep-last", "1", "--yes")
    assert said.code == 0, said.err
    assert steps(three) == [30]


@pytest.mark.parametrize("more", [[], ["--keep-last", "2"]])
def test_keep_best_by_an_unknown_metric_is_refused(fastckpt: Fastckpt, ten: Path, more: list[str]):
    """A typo would delete all but the newest."""
    said = fastckpt("prune", ten, "--keep-best", "3:val_loss", *more, "--yes")
    assert said.code == 2 and "'val_loss'" in said.err and "accuracy, loss" in said.err
    assert steps(ten) == list(range(100, 0, -10))


def test_keep_best_without_any_metrics_is_refused(fastckpt: Fastckpt, three: Path):
    said = fastckpt("prune", three, "--keep-best", "1:loss", "--yes")
    assert said.code == 2 and "no metrics" in said.err
    assert steps(three) == [30, 20, 10]


class TestHistories:
    """A job that did not load what the one before had saved, and one that went on from that."""

    @pytest.fixture
    def two(self, three: Path) -> Path:
        for step in (1, 2, 3):
            publish(three, step, history=2)
        return three

    def test_lines_of_training_are_pruned_separately(self, fastckpt: Fastckpt, two: Path):
        assert fastckpt("prune", two, "--keep-last", "1", "--yes").code == 0
        assert steps(two) == [3, 30]

    def test_histories_that_the_newest_resumed_from_are_pruned_as_one_line(self, fastckpt: Fastckpt, three: Path):
        publish(three, 1, history=2, parent=SaveId(1, 30))
        publish(three, 2, history=3, details={"histories": [[1, 2]]})
        assert fastckpt("prune", three, "--keep-last", "1", "--yes").code == 0
        assert steps(three) == [2]

    def test_a_history_named_by_drop_history_is_deleted(self, fastckpt: Fastckpt, two: Path):
        said = fastckpt("prune", two, "--drop-history", "1", "--yes", "--json").document
        assert [item["history"] for item in said["delete"]] == [1, 1, 1]
        assert steps(two) == [3, 2, 1]

    @pytest.mark.parametrize(("history", "why"), [("2", "newest"), ("7", r"\[1, 2\]")])
    def test_drop_history_of_the_newest_or_an_unknown_one_is_refused(
        self, fastckpt: Fastckpt, two: Path, history: str, why: str
    ):
        said = fastckpt("prune", two, "--drop-history", history, "--yes")
        assert said.code == 2
        assert re.search(why, said.err)
        assert steps(two) == [3, 2, 1, 30, 20, 10]
