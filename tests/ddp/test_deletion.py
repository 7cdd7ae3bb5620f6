"""Which checkpoints stay on storage, and what users' own deletion strategies may do."""

import os
from pathlib import Path
from typing import Any

import pytest

from fastckpt.ddp import (
    CheckpointDeletionStrategy,
    DdpCheckpointer,
    KeepLatestStepStrategy,
    KeepStepIntervalStrategy,
    StorageType,
)
from fastckpt.errors import ConfigError, PersistError
from fastckpt.storage.directory import CheckpointDirectory
from tests.ddp.conftest import Ranks, state, until


def save(member: DdpCheckpointer, *steps: int) -> None:
    for step in steps:
        assert member.save_checkpoint(step, state(step), storage_type=StorageType.DISK)
        member.wait_latest_checkpoint(60)


def on_storage(directory: Path) -> list[int]:
    return sorted(stored.id.step for stored in CheckpointDirectory(directory).checkpoints())


def folders(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("checkpoint-*")}


def becomes(directory: Path, *steps: int) -> None:
    """Deletion follows the persist, which is all that wait_latest_checkpoint waits for."""
    until(lambda: folders(directory) == {f"checkpoint-{step}" for step in steps}, f"{steps} alone on storage")


class Mine(CheckpointDeletionStrategy):
    """Keeps the newest two, by its own list."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: list[tuple[int, int]] = []

    def clean_up(self, step: int, delete_func: Any) -> None:
        self.seen.append((step, os.getpid()))
        if len(self.seen) > 2:
            delete_func(str(self.directory / f"checkpoint-{self.seen[-3][0]}"))


class TestOurs:
    def test_the_latest_are_kept(self, ranks: Ranks, directory: Path):
        (one,) = ranks.start(deletion_strategy=KeepLatestStepStrategy(2, str(directory)))
        save(one, 1, 2, 3, 4, 5)
        becomes(directory, 4, 5)

    def test_those_of_an_interval_are_kept_and_the_newest(self, ranks: Ranks, directory: Path):
        (one,) = ranks.start(deletion_strategy=KeepStepIntervalStrategy(4, str(directory)))
        save(one, 2, 4, 6, 8, 9, 10)
        becomes(directory, 4, 8, 10)

    def test_a_restart_of_the_agent_forgets_none(self, ranks: Ranks, directory: Path):
        for steps in ((1, 2), (3, 4), (5,)):
            (one,) = ranks.start(deletion_strategy=KeepLatestStepStrategy(2, str(directory)))
            one.load_checkpoint()
            save(one, *steps)
            ranks.end()
        assert on_storage(directory) == [4, 5]

    def test_an_older_history_goes_first(self, ranks: Ranks, directory: Path):
        (one,) = ranks.start(deletion_strategy=KeepLatestStepStrategy(2, str(directory)))
        save(one, 10, 20)
        one.load_checkpoint(directory / "checkpoint-10")
        save(one, 11)
        becomes(directory, 11, 20)
        save(one, 12)
        becomes(directory, 11, 12)

    def test_folders_of_others_stay(self, ranks: Ranks, directory: Path):
        (directory / "checkpoint-1").mkdir(parents=True)
        (directory / "checkpoint-1" / "precious").touch()
        (directory / "checkpoint-notes").mkdir()
        (one,) = ranks.start(deletion_strategy=KeepLatestStepStrategy(1, str(directory)))
        save(one, 2, 3)
        becomes_with_others = {"checkpoint-1", "checkpoint-notes", "checkpoint-3"}
        until(lambda: folders(directory) == becomes_with_others, "only ours are deleted")

    @pytest.mark.parametrize("count", [0, -1, 1.5])
    def test_no_number_to_keep_is_refused(self, directory: Path, count: Any):
        with pytest.raises(ConfigError, match="whole number, 1 or more"):
            KeepLatestStepStrategy(count, str(directory))
        with pytest.raises(ConfigError, match="whole number, 1 or more"):
            KeepStepIntervalStrategy(count, str(directory))


class TestTheirs:
    def test_runs_in_the_first_rank_once_per_checkpoint(self, ranks: Ranks, directory: Path):
        strategies = [Mine(directory), Mine(directory)]
        ranks.start(0)
        ranks.members = [ranks.join(rank, 2, deletion_strategy=strategies[rank]) for rank in (0, 1)]
        for step in (1, 2, 3, 4):
            for member in ranks.members:
                assert member.save_checkpoint(step, state(step), storage_type=StorageType.DISK)
            ranks.members[0].wait_latest_checkpoint(60)
        assert [step for step, _ in strategies[0].seen] == [1, 2, 3, 4]
        assert strategies[1].seen == []
        assert on_storage(directory) == [3, 4]

    def test_hears_of_the_flush_after_a_restart(self, ranks: Ranks, directory: Path):
        (one,) = ranks.start()
        one.save_checkpoint(7, state(7))
        ranks.workers_die()
        strategy = Mine(directory)
        (one,) = ranks.start_workers(deletion_strategy=strategy)
        one.wait_latest_checkpoint(60)
        assert [step for step, _ in strategy.seen] == [7]

    def test_what_it_deletes_with_is_confined(self, ranks: Ranks, directory: Path, tmp_path: Path):
        outside = tmp_path / "precious"
        outside.mkdir()

        refused: list[str] = []

        class Greedy(Mine):
            def clean_up(self, step: int, delete_func: Any) -> None:
                (directory / "link").unlink(missing_ok=True)
                (directory / "link").symlink_to(outside)
                newest = directory / f"checkpoint-{step}"
                for path in (outside, directory, directory / "..", directory / "link", Path("/"), newest):
                    with pytest.raises(ConfigError):
                        delete_func(str(path))
                    refused.append(path.name)
                delete_func(str(directory / "unknown"))

        strategy = Greedy(directory)
        (one,) = ranks.start(deletion_strategy=strategy)
        save(one, 1, 2)
        assert len(refused) == 12
        assert outside.is_dir() and on_storage(directory) == [1, 2]

    def test_deletes_by_the_names_that_users_of_flash_checkpoint_give(self, ranks: Ranks, directory: Path):
        class ByStep(Mine):
            def clean_up(self, step: int, delete_func: Any) -> None:
                if step > 1:
                    delete_func(str(directory / str(step - 1)))

        (one,) = ranks.start(deletion_strategy=ByStep(directory))
        save(one, 1, 2, 3)
        assert on_storage(directory) == [3]

    def test_may_have_an_attribute_of_any_name(self, ranks: Ranks, directory: Path):
        strategy = Mine(directory)
        strategy.policy = "mine alone"  # type: ignore[attr-defined]
        (one,) = ranks.start(deletion_strategy=strategy)
        save(one, 1)
        assert [step for step, _ in strategy.seen] == [1]

    def test_may_refine_one_of_ours(self, ranks: Ranks, directory: Path):
        seen: list[int] = []

        class Refined(KeepLatestStepStrategy):
            def clean_up(self, step: int, delete_func: Any) -> None:
                seen.append(step)

        strategy = Refined(1, str(directory))
        (one,) = ranks.start(deletion_strategy=strategy)
        save(one, 1, 2)
        assert seen == [1, 2]
        assert on_storage(directory) == [1, 2]

    def test_that_storage_refuses_does_not_end_training(self, ranks: Ranks, directory: Path, monkeypatch, said):
        def refuse(self: CheckpointDirectory, id: Any) -> None:
            raise PersistError("cannot delete: the file system is read-only")

        (one,) = ranks.start(deletion_strategy=Mine(directory))
        save(one, 1, 2)
        monkeypatch.setattr(CheckpointDirectory, "delete", refuse)
        save(one, 3, 4)
        assert "read-only" in said.text
