"""Persists that are due while one is in progress, for any intervals and durations: they are postponed."""

import random
from collections.abc import Callable

import pytest

from fastckpt._core.client.collective import SingleRank
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.schedule.persist_gate import PersistGate


class Watch:
    """A rank whose persists take so many turns each."""

    def __init__(self) -> None:
        self.left, self.overruns = 0, 0

    @property
    def idle(self) -> bool:
        return self.left == 0

    def overran(self) -> None:
        self.overruns += self.left > 0


def job(intervals: Callable[[int], Intervals], lasts: Callable[[], int], turns: int) -> tuple[list[int], Watch]:
    """The turns at which persists began."""
    watch = Watch()
    single, begun = PersistGate(SingleRank(), watch, 2), []
    for turn in range(1, turns + 1):
        watch.left = max(0, watch.left - 1)
        if single.begins(turn, intervals(turn)):
            assert intervals(turn).snapshots(turn)
            assert watch.idle, "two at once"
            begun.append(turn)
            watch.left = lasts()
    return begun, watch


@pytest.mark.parametrize(
    ("memory", "storage", "lasts", "expected"),
    [
        *(
            (*each, [*range(each[1], 31, each[1])])
            for each in ((1, 4, 1), (4, 4, 1), (2, 6, 3), (3, 3, 0), (5, 20, 17))
        ),
        (1, 4, 5, [4, 9, 14, 19, 24, 29]),
        (4, 4, 5, [4, 12, 20, 28]),
        (2, 4, 9, [4, 14, 24]),
    ],
)
def test_a_persist_begins_when_it_is_due_or_with_the_first_snapshot_after_the_former_one(
    memory, storage, lasts, expected
):
    begun, watch = job(lambda turn: Intervals(memory, storage), lambda: lasts, 30)
    assert begun == expected and (watch.overruns > 0) == (lasts > storage)


def test_any_job_has_one_persist_at_a_time_and_keeps_persisting():
    """Random intervals that change, random durations."""
    rng = random.Random(8)
    for _ in range(60):
        changes = sorted(rng.sample(range(1, 400), 4))
        memory = [rng.randint(1, 9) for _ in range(5)]
        pairs = [Intervals(m, m * rng.randint(1, 6), a) for m, a in zip(memory, [0, *changes], strict=True)]
        longest = rng.choice([0, 2, 10, 60])

        def intervals(turn, changes=changes, pairs=pairs):
            return pairs[sum(turn > change for change in changes)]

        begun, _ = job(intervals, lambda longest=longest: rng.randint(0, longest), 500)
        gap = max(b - a for a, b in zip([0, *begun], [*begun, 500], strict=True))
        assert gap <= longest + 2 * max(each.storage for each in pairs) + 20
