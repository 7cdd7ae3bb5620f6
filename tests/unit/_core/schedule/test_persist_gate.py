"""Persists that are due while one is in progress, for any intervals and durations: they are postponed."""

from collections.abc import Callable

from fastckpt._core.client.collective import SingleRank
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.schedule.persist_gate import PersistGate
from tests.support.tables import for_each


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


@for_each(
    *((*each, [*range(each[1], 31, each[1])]) for each in ((1, 4, 1), (4, 4, 1), (2, 6, 3), (3, 3, 0), (5, 20, 17))),
    (1, 4, 5, [4, 9, 14, 19, 24, 29]),
    (4, 4, 5, [4, 12, 20, 28]),
    (2, 4, 9, [4, 14, 24]),
)
def test_a_persist_begins_when_it_is_due_or_with_the_first_snapshot_after_the_former_one(
    memory, storage, lasts, expected
):
    begun, watch = job(lambda turn: Intervals(memory, storage), lambda: lasts, 30)
    assert begun == expected and (watch.overruns > 0) == (lasts > storage)
