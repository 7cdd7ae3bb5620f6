"""Who is slow, from windows of own times: tables."""

from collections.abc import Mapping, Sequence

import pytest

from fastckpt._core.policy.stragglers import PARTS, ROW, RankTimes, SlowRank, Stragglers
from tests.support.tables import for_each


def times(owns: Mapping[int, float], part: int = 2) -> dict[int, RankTimes]:
    """A window of ranks with these own times, of which what exceeds 0.6 was lost in a part; all steps end together."""
    step = max(owns.values()) + 0.4
    found = {}
    for rank, own in owns.items():
        parts = [0.05, 0.2, 0.3, 0.05]
        parts[part] += own - sum(parts)
        found[rank] = RankTimes(own, (*parts, step - own))
    return found


def run(windows: Sequence[Sequence[float]], part: int = 2) -> tuple[list[tuple[int, SlowRank]], list[tuple[int, int]]]:
    """What begins and ends, each with the index of its window."""
    judge, began, ended = Stragglers(), [], []
    for index, owns in enumerate(windows):
        more, fewer = judge.see(index + 2, times(dict(enumerate(owns)), part))
        began += [(index, one) for one in more]
        ended += [(index, one.rank) for one in fewer]
    return began, ended


CALM = [0.6] * 4


@for_each((2, 0), (3, 1), (4, 2), (40, 3))
def test_a_rank_that_becomes_slow_is_named_with_its_part_and_cost_after_three_windows(ranks: int, part: int):
    slow = [0.6] * (ranks - 1) + [0.9]
    began, ended = run([[0.6] * ranks] * 5 + [slow] * 5, part)
    ((index, one),) = began
    assert (index, one.rank, one.part) == (5 + ROW - 1, ranks - 1, PARTS[part])
    assert one.cost == pytest.approx(0.3)
    assert (one.own, one.others) == (pytest.approx(0.9), pytest.approx(0.6))
    assert not ended


def test_a_slow_rank_is_named_once_and_its_end_is_said_once():
    began, ended = run([CALM] * 3 + [[*CALM[:3], 0.9]] * 40 + [CALM] * 6)
    assert [one.rank for _, one in began] == [3]
    assert ended == [(3 + 40 + ROW - 1, 3)]


def test_a_rank_that_goes_back_and_forth_around_the_limit_is_not_named_again_and_again():
    above, below = [*CALM[:3], 0.6 * 1.2], [*CALM[:3], 0.6 * 1.12]
    began, ended = run([CALM] * 5 + [above] * 4 + [below, below, above] * 10)
    assert len(began) == 1 and not ended


SLOW = 0.9
CASES = {
    "all alike": [CALM] * 5 + [[SLOW] * 4] * 10,
    "two windows": [CALM] * 5 + [[*CALM[:3], SLOW]] * (ROW - 1) + [CALM] * 10,
    "another rank in each window": [[SLOW if rank == window % 4 else 0.6 for rank in range(4)] for window in range(30)],
    "two ranks in turns": [[SLOW if rank == window % 2 else 0.6 for rank in range(2)] for window in range(30)],
    "three of four": [CALM] * 5 + [[0.6, SLOW, SLOW, SLOW]] * 10,
    "a little": [CALM] * 5 + [[*CALM[:3], 0.6 * 1.14]] * 10,
    "ranks that differ all the time": [[0.5, 0.6, 0.7, 0.8]] * 30,
    "a rank alone": [[0.6]] * 5 + [[SLOW]] * 5,
    "nothing measured": [[0.0, 0.0]] * 10,
}


@for_each(*CASES.values())
def test_nobody_is_named(windows: list[list[float]]):
    assert run(windows) == ([], [])
