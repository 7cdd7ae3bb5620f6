"""Saves after a rank has left before the others: rank 1 closes, in order and otherwise; rank 0 goes on."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core.memory.arena import Arena
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


@contextlib.contextmanager
def closing_with_a_bad_state(member: DdpCheckpointer) -> Iterator[None]:
    with pytest.raises(NotLoadable):
        member.save_checkpoint(2, state(2), rank_state={"bad": object()}, storage_type=MEMORY)
    yield
    member.close()


@pytest.mark.parametrize(
    ("leaver", "way", "error"),
    [
        (0, contextlib.closing, None),  # which has the model
        (1, closing_with_a_bad_state, None),
        (1, contextlib.closing, ArithmeticError),  # in a finally
        (1, lambda member: member, ArithmeticError),
        (1, lambda member: member, SystemExit),
    ],
)
def test_a_rank_that_leaves_without_a_good_state_of_its_own_lends_nothing(ranks: Ranks, leaver: int, way, error):
    members = saved(ranks, 1)
    with pytest.raises(error) if error else contextlib.nullcontext(), way(members[leaver]):
        if error:
            raise error
    result = save(members[1 - leaver], 1 - leaver, 3)
    assert result.reason == ("" if error is SystemExit else f"rank {leaver} has closed")
    if not result:
        assert resumed(ranks) == [(1, 0, 1), (1, 1, 1)]


def test_a_lent_part_is_not_replaced_by_memory_that_is_reserved_ahead(ranks: Ranks, monkeypatch):
    begins, goes_on, begin = threading.Event(), threading.Event(), Arena.begin

    def held(self: Arena, slot: Path, name: str, *arguments: Any) -> None:
        if "rank_1" in name:
            begins.set()
            goes_on.wait(60)
        begin(self, slot, name, *arguments)

    monkeypatch.setattr(Arena, "begin", held)
    first, second = saved(ranks, 1)
    assert begins.wait(60), "memory for the next save of rank 1"
    second.close()
    threading.Timer(0.3, goes_on.set).start()  # the save waits for it
    assert save(first, 0, 2)
    assert resumed(ranks) == [(2, 0, 2), (2, 1, 1)]


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
    place = first._writer.link.arena
    if when == "before it":
        remove_live(place)
    second.close()
    if when == "after it":
        remove_live(place)
    results = [save(first, 0, step) for step in (2, 3)]
    assert results[-1].reason == "rank 1 has closed"
    assert not place.exists() or place.stat().st_mode & 0o777 == 0o700
