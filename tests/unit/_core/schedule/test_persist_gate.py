"""Persists that are due while one is in progress, for any intervals and durations: they are postponed."""

import random
from collections.abc import Callable

import pytest

from fastckpt._core.client.collective import SingleRank
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.schedule.persist_gate import PersistGate


class Watch:
    """A rank whose persists take so many turns each."""

    def __init__(self, lasts: Callable[[], int]) -> None:
        self.left, self.overruns, self._lasts = 0, 0, lasts

    @property
    def idle(self) -> bool:
        return self.left == 0

    def overran(self) -> None:
        self.overruns += self.left > 0

    def begin(self) -> None:
        assert self.idle, "two at once"
        self.left = self._lasts()


def job(intervals: Callable[[int], Intervals], lasts: Callable[[], int], turns: int) -> tuple[list[int], Watch]:
    """The turns at which persists began."""
    watch = Watch(lasts)
    single, begun = PersistGate(SingleRank(), watch, 2), []
    for turn in range(1, turns + 1):
        watch.left = max(0, watch.left - 1)
        if single.begins(turn, intervals(turn)):
            assert intervals(turn).snapshots(turn)
            begun.append(turn)
            watch.begin()
    return begun, watch


@pytest.mark.parametrize(("memory", "storage", "lasts"), [(1, 4, 1), (4, 4, 1), (2, 6, 3), (3, 3, 0), (5, 20, 17)])
def test_persists_that_end_in_time_begin_when_they_are_due(memory, storage, lasts):
    begun, watch = job(lambda turn: Intervals(memory, storage), lambda: lasts, 100)
    assert begun == list(range(storage, 101, storage))
    assert watch.overruns == 0


@pytest.mark.parametrize(
    ("memory", "storage", "lasts", "expected"),
    [(1, 4, 5, [4, 9, 14, 19, 24, 29]), (4, 4, 5, [4, 12, 20, 28]), (2, 4, 9, [4, 14, 24])],
)
def test_a_postponed_persist_begins_with_the_first_snapshot_after_the_former_one(memory, storage, lasts, expected):
    begun, watch = job(lambda turn: Intervals(memory, storage), lambda: lasts, 30)
    assert begun == expected
    assert watch.overruns > 0


def test_any_job_has_one_persist_at_a_time_and_keeps_persisting():
    """Random intervals that change, random durations."""
    rng = random.Random(8)
    for _ in range(300):
        changes = sorted(rng.sample(range(1, 400), 4))
        memory = [rng.randint(1, 9) for _ in range(5)]
        pairs = [Intervals(m, m * rng.randint(1, 6), a) for m, a in zip(memory, [0, *changes], strict=True)]
        longest = rng.choice([0, 2, 10, 60])

        def intervals(turn, changes=changes, pairs=pairs):
            return pairs[sum(turn > change for change in changes)]

        begun, _ = job(intervals, lambda longest=longest: rng.randint(0, longest), 500)
        gap = max(b - a for a, b in zip([0, *begun], [*begun, 500], strict=True))
        assert gap <= longest + 2 * max(each.storage for each in pairs) + 20
