"""Saves after a rank has left before the others: rank 1 closes, in order and otherwise; rank 0 goes on."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import NotLoadable
from tests.e2e.ddp.conftest import Ranks, state
from tests.support.live_folders import remove_live

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


def save(member: DdpCheckpointer, rank: int, step: int) -> Any:
    return member.save_checkpoint(step, state(step), rank_state={"at": step, "rank": rank}, storage_type=MEMORY)


def saved(ranks: Ranks, *steps: int) -> tuple[DdpCheckpointer, DdpCheckpointer]:
    first, second = ranks.start(2)
    for step in steps:
        save(first, 0, step), save(second, 1, step)
    return first, second


def resumed(ranks: Ranks) -> list[tuple[int, int, int]]:
    """Step, and the rank and step of the state of its own, of each rank."""
    ranks.workers_die()
    ranks.start_workers(2)
    steps = [loaded["step"] for loaded in ranks.load()]
    own = [member.rank_state for member in ranks.members]
    return [(step, each["rank"], each["at"]) for step, each in zip(steps, own, strict=True)]


@pytest.mark.parametrize(("before", "after"), [((), (2, 3, 4)), ((2,), ())], ids=["later saves", "waiting saves"])
def test_a_rank_that_leaves_lends_its_last_save(ranks: Ranks, before: tuple[int, ...], after: tuple[int, ...]):
    first, second = saved(ranks, 1)
    for step in before:
        save(first, 0, step)
    second.close()
    assert all(save(first, 0, step) for step in after)
    last = max(before + after)
    assert resumed(ranks) == [(last, 0, last), (last, 1, 1)]


def test_a_leaving_rank_that_has_the_model_ends_all_saves(ranks: Ranks, said):
    first, second = saved(ranks, 1)
    first.close()
    assert save(second, 1, 2).reason == "rank 0 has closed"
    ranks.end()
    assert "1 save was skipped, as rank 0 has closed: the newest checkpoint is step 1 of history 1" in said.text


@pytest.mark.parametrize("error", [ArithmeticError, SystemExit])
@pytest.mark.parametrize("closes", [contextlib.closing, lambda member: member], ids=["in finally", "in with"])
def test_a_rank_that_leaves_by_an_exception_lends_nothing_unless_it_exits(ranks: Ranks, closes, error):
    first, second = saved(ranks, 1)
    with pytest.raises(error), closes(second):
        raise error
    result = save(first, 0, 2)
    assert bool(result) == (error is SystemExit)
    if not result:
        assert result.reason == "rank 1 has closed"
        assert resumed(ranks) == [(1, 0, 1), (1, 1, 1)]


def test_a_leaving_rank_whose_state_cannot_be_saved_lends_nothing(ranks: Ranks):
    first, second = saved(ranks, 1)
    with pytest.raises(NotLoadable):
        second.save_checkpoint(2, state(2), rank_state={"bad": object()}, storage_type=MEMORY)
    second.close()
    assert save(first, 0, 3).reason == "rank 1 has closed"
    assert resumed(ranks) == [(1, 0, 1), (1, 1, 1)]


def test_a_rank_that_opens_another_checkpointer_lends_to_earlier_saves(ranks: Ranks):
    first, second = saved(ranks, 1, 2, 3)
    second.close()
    again = ranks.join(1, 2)
    for step in (4, 5):
        assert first.save_checkpoint(step, state(step), storage_type=DISK), "as if it were not there yet"
    assert first.wait_latest_checkpoint(60) == 5
    first.close()
    ranks.members = [ranks.join(0, 2), again]
    for rank, member in enumerate(ranks.members):
        save(member, rank, 6)
    assert resumed(ranks) == [(6, 0, 6), (6, 1, 6)]


def test_a_rank_that_leaves_after_a_rollback_lends_the_step_it_loaded(ranks: Ranks, directory: Path):
    first, second = saved(ranks, 1, 2)
    for member in (first, second):
        member.save_checkpoint(2, state(2), storage_type=DISK)
    assert first.wait_latest_checkpoint(60) == 2
    save(first, 0, 5), save(second, 1, 5)
    ranks.load(directory / "checkpoint-2")
    second.close()
    assert save(first, 0, 3)
    assert resumed(ranks) == [(3, 0, 3), (3, 1, 2)]


@pytest.mark.parametrize("when", ["before it", "after it"])
def test_a_leaving_rank_does_not_recreate_a_removed_arena(ranks: Ranks, when: str):
    first, second = saved(ranks, 1)
    arena = first._writer.link.arena
    if when == "before it":
        remove_live(arena)
    second.close()
    if when == "after it":
        remove_live(arena)
    results = [save(first, 0, step) for step in (2, 3)]
    assert results[-1].reason == "rank 1 has closed"
    assert not arena.exists() or arena.stat().st_mode & 0o777 == 0o700
