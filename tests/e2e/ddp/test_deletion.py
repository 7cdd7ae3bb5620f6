"""Retention on storage, built-in and by deletion strategies of users."""

import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import (
    CheckpointDeletionStrategy,
    DdpCheckpointer,
    KeepAnyStrategy,
    KeepBestStrategy,
    KeepLatestStepStrategy,
    KeepTimeIntervalStrategy,
    StorageType,
)
from fastckpt.errors import ConfigError, PersistError
from tests.e2e.ddp.conftest import on_storage, state, until


def save(member: DdpCheckpointer, *steps: int, **measures: list[float]) -> None:
    for i, step in enumerate(steps):
        found = {name: values[i] for name, values in measures.items()}
        assert member.save_checkpoint(step, state(step), storage_type=StorageType.DISK, metrics=found)
        member.wait_latest_checkpoint(60)


def becomes(directory: Path, *names: int | str) -> None:
    """Deletion follows the persist, which is all that wait_latest_checkpoint waits for."""
    wanted = {f"checkpoint-{name}" for name in names}
    until(lambda: {path.name for path in directory.glob("checkpoint-*")} == wanted, f"{names} alone on storage")


def test_retention_after_a_restart_of_the_agent_knows_times_and_metrics(ranks, directory, monkeypatch):
    """Each launch knows of earlier checkpoints only what is on storage; the clock jumps back in between."""
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    minutes = {1: 605, 2: 607, 3: 612, 4: 614, 5: 550, 6: 552, 7: 561, 8: 563}
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.0, 6: 9.0, 7: 8.0, 8: 7.0}
    for steps in ((1, 2, 3), (4,), (5, 6), (7, 8)):
        place = str(directory)
        strategy = KeepAnyStrategy(KeepTimeIntervalStrategy(10, place), KeepBestStrategy(2, "loss", place))
        (one,) = ranks.start(deletion_strategy=strategy)
        one.load_checkpoint()
        for step in steps:
            now[0] = 60.0 * minutes[step]
            save(one, step, loss=[losses[step]])
        ranks.end()
    assert on_storage(directory) == [1, 2, 3, 5, 7, 8]  # by time 1, 3, 5, 7, by loss 2, 5, the newest 8


def test_a_script_that_saves_without_loading_or_loads_from_elsewhere_deletes_no_earlier_checkpoint(
    ranks, directory, tmp_path, said
):
    """Months of training must stay. Histories of another directory are others, though they bear the same numbers."""
    strategy = KeepLatestStepStrategy(2, str(directory))
    (one,) = ranks.start(deletion_strategy=strategy)
    save(one, 1000, 1001, 1002)
    becomes(directory, 1001, 1002)
    ranks.end()
    assert "without loading" not in said.text
    (one,) = ranks.start(deletion_strategy=strategy)
    save(one, 1, 2, 3, 4)
    becomes(directory, 3, 4, 1001, 1002)
    assert said.text.count("without loading step 1002") == 1
    ranks.end()
    (one,) = ranks.start(deletion_strategy=strategy)
    one.load_checkpoint(directory / "checkpoint-1002")  # the mistake is mended
    save(one, 1003, 1004)
    becomes(directory, 3, 4, 1003, 1004)
    assert said.text.count("without loading") == 1
    ranks.end()
    elsewhere = shutil.copytree(directory, tmp_path / "elsewhere")
    (one,) = ranks.start(deletion_strategy=strategy)
    one.load_checkpoint(elsewhere / "checkpoint-1004")
    save(one, 1005, 1006, 1007)
    becomes(directory, 3, 4, 1003, 1004, 1006, 1007)


def test_a_line_of_training_continues_over_histories_that_only_memory_had(ranks, directory):
    """Old and best, then restarts of which nothing became durable, then better: the old one is not another's."""
    strategy = KeepBestStrategy(1, "accuracy", str(directory), mode="max")
    (one,) = ranks.start(deletion_strategy=strategy)
    save(one, 1, accuracy=[0.9])
    for step in (2, 3):
        one.load_checkpoint()
        one.save_checkpoint(step, state(step), storage_type=StorageType.MEMORY)
    one.load_checkpoint()
    save(one, 4, accuracy=[0.5])
    becomes(directory, 1, 4)
    save(one, 5)
    becomes(directory, 1, 5)
    save(one, 6, accuracy=[1.0])
    becomes(directory, 6)


# --- strategies of users


class Mine(CheckpointDeletionStrategy):
    """Keeps the newest two, by its own list."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: list[int] = []

    def clean_up(self, step: int, delete_func: Any) -> None:
        self.seen.append(step)
        if len(self.seen) > 2:
            delete_func(str(self.directory / f"checkpoint-{self.seen[-3]}"))


def test_a_user_strategy_runs_in_the_first_rank_once_per_checkpoint(ranks, directory):
    """Also for the flush after a restart."""
    strategies = [Mine(directory), Mine(directory)]
    for strategy in strategies:
        strategy.policy = "mine alone"  # type: ignore[attr-defined]
    ranks.start(0)
    ranks.members = [ranks.join(rank, 2, deletion_strategy=strategies[rank]) for rank in (0, 1)]
    for step in (1, 2, 3, 4, 5):
        for member in ranks.members:
            how = StorageType.DISK if step < 5 else StorageType.MEMORY
            assert member.save_checkpoint(step, state(step), storage_type=how)
        ranks.members[0].wait_latest_checkpoint(60)
    assert [each.seen for each in strategies] == [[1, 2, 3, 4], []] and on_storage(directory) == [3, 4]
    ranks.workers_die()
    (one, _) = ranks.start_workers(2, deletion_strategy=(strategy := Mine(directory)))
    one.wait_latest_checkpoint(60)
    assert strategy.seen[-1] == 5


def test_a_user_strategy_that_deletes_the_step_it_is_called_with_keeps_the_newest(ranks, directory):
    """As those of Flash Checkpoint do, which is called one checkpoint later; workers are restarted in between."""

    class EveryThird:  # the interface, and none of our classes
        def clean_up(self, step: int, delete_func: Any) -> None:
            if step % 3:
                delete_func(str(directory / str(step)))

    (one,) = ranks.start(deletion_strategy=EveryThird())
    save(one, 1, 2, 3, 4)
    assert on_storage(directory) == [3, 4]
    ranks.workers_die()
    (one,) = ranks.start_workers(deletion_strategy=EveryThird())
    assert one.load_checkpoint()["step"] == 4
    save(one, 5, 6, 7)
    assert on_storage(directory) == [3, 6, 7]


def test_a_user_strategy_may_subclass_a_built_in_one_and_delete_within_the_directory_only(ranks, directory, tmp_path):
    (outside := tmp_path / "precious").mkdir()
    refused: list[str] = []

    class Greedy(KeepLatestStepStrategy):
        def clean_up(self, step: int, delete_func: Any) -> None:
            (directory / "link").unlink(missing_ok=True)
            (directory / "link").symlink_to(outside)
            for path in (outside, directory, directory / "..", directory / "link", Path("/")):
                with pytest.raises(ConfigError):
                    delete_func(str(path))
                refused.append(path.name)
            delete_func(str(directory / "unknown"))

    (one,) = ranks.start(deletion_strategy=Greedy(1, str(directory)))
    save(one, 1, 2)
    assert len(refused) == 10
    assert outside.is_dir() and on_storage(directory) == [1, 2]


def test_an_error_of_a_user_strategy_is_raised_by_a_complete_save(ranks, directory):
    class Faulty(Mine):
        def clean_up(self, step: int, delete_func: Any) -> None:
            super().clean_up(step, delete_func)
            if len(self.seen) <= 2:
                raise KeyError(f"no plan {len(self.seen)}")

    strategy = Faulty(directory)
    (one,) = ranks.start(deletion_strategy=strategy)
    for path in ("", directory / "twice.pt"):
        one.save_checkpoint(1, state(1), path, StorageType.DISK)
    until(lambda: ranks.saver.report()[0].persisted == 2, "the step is durable in two places")
    for step in (2, 3):
        with pytest.raises(KeyError, match=f"no plan {step - 1}") as raised:
            one.save_checkpoint(step, state(step), storage_type=StorageType.MEMORY)
        assert "Raised by the deletion strategy for step 1" in raised.value.__notes__[0]
    save(one, 4, 5, 6)
    assert strategy.seen == [1, 1, 4, 5, 6]
    assert on_storage(directory) == [5, 6]
    assert one.load_checkpoint()["step"] == 6


def test_a_deletion_that_storage_refuses_does_not_end_training(ranks, directory, monkeypatch, said):
    def refuse(self: CheckpointDirectory, id: Any) -> None:
        raise PersistError("cannot delete: the file system is read-only")

    monkeypatch.setattr(CheckpointDirectory, "delete", refuse)
    (one,) = ranks.start(deletion_strategy=Mine(directory))
    save(one, 1, 2, 3, 4)
    assert "read-only" in said.text


# --- metrics


def test_metrics_of_the_first_rank_are_in_the_manifest(ranks, directory):
    """Also if they are given once the step is in memory; those that are no finite numbers are left out or refused."""
    measured = {"loss": torch.tensor(1.5), "epoch": 3, "norm": -math.inf, "lr": math.nan}
    for rank, member in enumerate(ranks.start(2)):
        for name, value, shown in (("loss", torch.ones(2), "'loss' is a Tensor"), (3, 0.5, "3 is")):
            with pytest.raises(ConfigError, match=f"the metric {shown}"):
                member.save_checkpoint(1, state(1), metrics={name: value}, storage_type=StorageType.MEMORY)
        member.save_checkpoint(1, state(1), storage_type=StorageType.DISK, metrics=measured if rank == 0 else {})
        member.save_checkpoint(2, state(2), storage_type=StorageType.MEMORY)
    for rank, member in enumerate(ranks.members):
        metrics = {"loss": 0.5 + rank}
        assert member.save_checkpoint(2, state(9), storage_type=StorageType.DISK, metrics=metrics)
        member.save_checkpoint(3, state(3), metrics={"loss": 1.25 + rank}, storage_type=StorageType.MEMORY)
    ranks.end()
    kept = {each.id.step: each.manifest.details.get("metrics") for each in CheckpointDirectory(directory).checkpoints()}
    assert kept == {1: {"loss": 1.5, "epoch": 3.0}, 2: {"loss": 0.5}, 3: {"loss": 1.25}}
    assert torch.load(directory / "checkpoint-2" / "model.pt")["step"] == 2
