"""Saves after a rank has left before the others."""

import contextlib
from pathlib import Path

import pytest

from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import NotLoadable
from tests.e2e.ddp.conftest import Ranks, state
from tests.support.live_folders import remove_live

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


class TestLeavingRank:
    """Rank 1 closes, in order and otherwise; rank 0 goes on."""

    def saved(self, ranks: Ranks, *steps: int) -> tuple[DdpCheckpointer, DdpCheckpointer]:
        first, second = ranks.start(2)
        for step in steps:
            for rank, member in enumerate((first, second)):
                member.save_checkpoint(step, state(step), rank_state={"at": step, "rank": rank}, storage_type=MEMORY)
        return first, second

    def resumed(self, ranks: Ranks) -> list[tuple[int, dict[str, int]]]:
        ranks.workers_die()
        ranks.start_workers(2)
        steps = [loaded["step"] for loaded in ranks.load()]
        return [(step, member.rank_state) for step, member in zip(steps, ranks.members, strict=True)]

    def test_a_rank_that_leaves_lends_its_last_save_to_later_saves(self, ranks: Ranks):
        first, second = self.saved(ranks, 1, 2)
        second.close()
        for step in (3, 4, 5):
            assert first.save_checkpoint(step, state(step), rank_state={"at": step, "rank": 0}, storage_type=MEMORY)
        assert self.resumed(ranks) == [(5, {"at": 5, "rank": 0}), (5, {"at": 2, "rank": 1})]

    def test_a_rank_that_leaves_lends_to_waiting_saves_but_not_to_passed_ones(self, ranks: Ranks):
        first, second = self.saved(ranks, 1)
        first.save_checkpoint(2, state(2), rank_state={"at": 2, "rank": 0}, storage_type=MEMORY)
        second.close()
        assert self.resumed(ranks) == [(2, {"at": 2, "rank": 0}), (2, {"at": 1, "rank": 1})]

    def test_a_leaving_rank_that_has_the_model_ends_all_saves(self, ranks: Ranks, said):
        first, second = self.saved(ranks, 1)
        first.close()
        assert second.save_checkpoint(2, state(2), storage_type=MEMORY).reason == "rank 0 has closed"
        ranks.end()
        assert "1 save was skipped, as rank 0 has closed: the newest checkpoint is step 1 of history 1" in said.text

    @pytest.mark.parametrize("error", [ArithmeticError, SystemExit])
    @pytest.mark.parametrize("closes", [contextlib.closing, lambda member: member], ids=["in finally", "in with"])
    def test_a_rank_that_leaves_by_an_exception_lends_nothing_unless_it_exits(self, ranks: Ranks, closes, error):
        first, second = self.saved(ranks, 1)
        with pytest.raises(error), closes(second):
            raise error
        saved = first.save_checkpoint(2, state(2), storage_type=MEMORY)
        assert bool(saved) == (error is SystemExit)
        if not saved:
            assert saved.reason == "rank 1 has closed"
            assert [step for step, _ in self.resumed(ranks)] == [1, 1]

    def test_a_leaving_rank_whose_state_cannot_be_saved_lends_nothing(self, ranks: Ranks):
        first, second = self.saved(ranks, 1)
        with pytest.raises(NotLoadable):
            second.save_checkpoint(2, state(2), rank_state={"bad": object()}, storage_type=MEMORY)
        second.close()
        assert first.save_checkpoint(3, state(3), storage_type=MEMORY).reason == "rank 1 has closed"
        assert [step for step, _ in self.resumed(ranks)] == [1, 1]

    def test_a_rank_that_opens_another_checkpointer_lends_to_earlier_saves(self, ranks: Ranks):
        first, second = self.saved(ranks, 1, 2, 3)
        second.close()
        again = ranks.join(1, 2)
        for step in (4, 5):
            assert first.save_checkpoint(step, state(step), storage_type=DISK), "as if it were not there yet"
        assert first.wait_latest_checkpoint(60) == 5
        first.close()
        ranks.members = [ranks.join(0, 2), again]
        for rank, member in enumerate(ranks.members):
            member.save_checkpoint(6, state(6), rank_state={"at": 6, "rank": rank}, storage_type=MEMORY)
        assert self.resumed(ranks) == [(6, {"at": 6, "rank": 0}), (6, {"at": 6, "rank": 1})]

    def test_a_rank_that_leaves_after_a_rollback_lends_the_step_it_loaded(self, ranks: Ranks, directory: Path):
        first, second = self.saved(ranks, 1, 2)
        for member in (first, second):
            member.save_checkpoint(2, state(2), storage_type=DISK)
        assert first.wait_latest_checkpoint(60) == 2
        for rank, member in enumerate((first, second)):
            member.save_checkpoint(5, state(5), rank_state={"at": 5, "rank": rank}, storage_type=MEMORY)
        ranks.load(directory / "checkpoint-2")
        second.close()
        assert first.save_checkpoint(3, state(3), rank_state={"at": 3, "rank": 0}, storage_type=MEMORY)
        assert self.resumed(ranks) == [(3, {"at": 3, "rank": 0}), (3, {"at": 2, "rank": 1})]

    @pytest.mark.parametrize("when", ["before it", "after it"])
    def test_a_leaving_rank_does_not_recreate_a_removed_arena(self, ranks: Ranks, when: str):
        first, second = self.saved(ranks, 1)
        arena = first._writer.link.arena
        if when == "before it":
            remove_live(arena)
        second.close()
        if when == "after it":
            remove_live(arena)
        results = [first.save_checkpoint(step, state(step), storage_type=MEMORY) for step in (2, 3)]
        assert results[-1].reason == "rank 1 has closed"
        assert not arena.exists() or arena.stat().st_mode & 0o777 == 0o700
