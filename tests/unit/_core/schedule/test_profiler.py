"""Ranks that profile make the same decisions, whatever their own clocks and storage report."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from fastckpt._core.policy.frequency.overhead import Iteration
from fastckpt._core.policy.frequency.profiling import MOST, Profile
from fastckpt._core.policy.frequency.tuning import Terms
from fastckpt._core.schedule.profiler import Due, Profiler
from fastckpt._core.schedule.stopwatch import ProcessorTime


class Rank:
    """An agreement, as one rank sees it that is a thread: all share what each has sent."""

    def __init__(self, rank: int, world: int, sent: dict[int, dict[int, Any]], changed: threading.Condition) -> None:
        self._rank, self._world, self._sent, self._changed = rank, world, sent, changed
        self._number = 0

    def send(self, value: Any) -> Callable[[], list[Any]]:
        with self._changed:
            said = self._sent.setdefault(self._number, {})
            said[self._rank] = json.loads(json.dumps(value))
            self._changed.notify_all()
        self._number += 1

        def answers() -> list[Any]:
            with self._changed:
                assert self._changed.wait_for(lambda: len(said) == self._world, 60), "a rank does not speak"
            return [said[rank] for rank in range(self._world)]

        return answers


@dataclass
class Watch:
    """What a rank has measured by itself: of saves that stall so long, and of persists that take so many turns."""

    stall: float
    persist_turns: int
    fails: int = 0
    durations: list[float] = field(default_factory=list)
    left: int = 0

    @property
    def idle(self) -> bool:
        return self.left == 0

    @property
    def processor(self) -> ProcessorTime:
        return ProcessorTime(0, 1)

    def turn(self, seconds: float, due: Due) -> Iteration:
        """The iteration that follows a turn which ended so."""
        if due.persist:
            assert self.idle, "two persists at once"
            self.left = self.persist_turns
        persisting = self.left > 0
        if persisting:
            self.left -= 1
            if not self.left and not self.fails:
                self.durations.append(self.persist_turns * seconds)
            elif not self.left:
                self.fails -= 1
        stall = self.stall if due.snapshot else 0.0
        return Iteration(seconds + stall, stall, due.snapshot, persisting)


Found = tuple[list[Due], Profile | None]


def alone(ranks: Any, watch: Watch, clock: Callable[[int], float], turns: int) -> Found:
    """What one rank did at each turn until it had a profile."""
    profiler = Profiler(ranks, watch, Terms(0.035), turns=range(1, MOST + 1))
    dues: list[Due] = []
    for turn in range(1, turns):
        profile = profiler.turn(turn, watch.turn(clock(turn), dues[-1]) if dues else None)
        if profile is not None:
            return dues, profile
        dues.append(profiler.due(turn))
    return dues, None


def run(watches: list[Watch], clocks: list[Callable[[int], float]], turns: int = 400) -> Found:
    """What all ranks did alike."""
    world, table, changed = len(watches), dict[int, dict[int, Any]](), threading.Condition()
    ranks = [Rank(rank, world, table, changed) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        runs = [pool.submit(alone, *each, turns) for each in zip(ranks, watches, clocks, strict=True)]
        found = [each.result() for each in runs]
    assert all(each == found[0] for each in found), "ranks differ"
    return found[0]


def saves(dues: list[Due]) -> list[int]:
    return [turn for turn, due in enumerate(dues, 1) if due.snapshot]


def persists(dues: list[Due]) -> list[int]:
    return [turn for turn, due in enumerate(dues, 1) if due.persist]


def test_ranks_with_unlike_clocks_profile_the_same_steps():
    dues, profile = run([Watch(0.02, 3), Watch(0.05, 5)], [lambda turn: 0.5, lambda turn: 0.7])
    assert dues[0] == Due(snapshot=True, persist=True)
    assert MOST <= len(dues) <= MOST + 5 * len(persists(dues)) + 10, "iterations beside a persist do not count"
    assert profile.stall == 0.05
    assert profile.iteration == pytest.approx(0.6)
    assert (profile.slowdown, profile.copy_slowdown) == pytest.approx((0.0, 0.0))


def test_a_persist_that_failed_on_one_rank_is_repeated_by_all_while_saves_to_memory_continue():
    dues, profile = run([Watch(0.01, 2), Watch(0.01, 4, fails=2)], [lambda turn: 0.5] * 2)
    assert len(persists(dues)) >= 3
    assert profile is not None and profile.duration == 2.0
    dues, profile = run([Watch(0.01, 2, fails=10**6)], [lambda turn: 0.5])
    assert profile is None and len(saves(dues)) >= len(dues) / 2 - 1
