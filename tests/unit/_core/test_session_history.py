"""Pairing of the checkpointers of a process that save the same steps."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fastckpt._core.client.saver_options import SaverOptions
from fastckpt._core.config import RankInfo, Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.resume.companions import BESIDE
from fastckpt._core.resume.resume import ResumeResult
from fastckpt._core.session_history import SessionHistory

Pair = tuple[SessionHistory, SessionHistory]


def history(directory: str, rank: int, number: int) -> SessionHistory:
    link: Any = SimpleNamespace(options=SaverOptions(directory), history=number)
    return SessionHistory(link, RankInfo(rank=rank), Settings())


@pytest.fixture
def pair() -> Iterator[Pair]:
    gc.collect()
    both = history("/a", 0, 1), history("/b", 0, 2)
    yield both
    for each in both:
        each.leave()


def load(pair: Pair, step: int | None, *, paired: bool = True) -> None:
    for each, other in (pair, pair[::-1]):
        details = {BESIDE: {other.directory: 1}} if paired else {}
        loaded(each, None if step is None else SaveId(0, step), details)


def loaded(each: SessionHistory, save: SaveId | None, details: dict[str, Any]) -> None:
    each.go_on_from(ResumeResult(save, "", save and {}, details))


def saved(each: SessionHistory, step: int) -> dict[str, int]:
    return each.details(SaveId(1, step)).get(BESIDE, {})


@pytest.mark.parametrize("start", [None, 10])
def test_two_checkpointers_that_save_each_step_are_paired_from_the_first(pair: Pair, start: int | None):
    load(pair, start)
    for step in (11, 12, 15):
        assert saved(pair[0], step) == {"/b": 2}
        assert saved(pair[1], step) == {"/a": 1}


@pytest.mark.parametrize("start", [None, 1000])
def test_a_checkpointer_that_saves_less_often_does_not_restrict_the_other(pair: Pair, start: int | None):
    """Every 500 and every 1,000 steps: what the second lacks, the first goes on from all the same."""
    load(pair, start, paired=False)
    for step in range(1500, 5001, 500):
        assert saved(pair[0], step) == {} or (start is None and step == 1500)
        if step % 1000 == 0:
            saved(pair[1], step)


def test_checkpointers_of_other_ranks_and_closed_ones_are_not_paired(pair: Pair):
    load(pair, 10)
    other = history("/c", 1, 3)
    loaded(other, SaveId(0, 10), {BESIDE: {"/a": 1}})
    pair[1].leave()
    assert saved(pair[0], 11) == {}
