"""Judgement on ranks that hold up the others: by their own time in steps, not by that of collectives.

Own times of ranks are compared with the median of the others, which fewer than half of them cannot move far. Their
variation by chance is estimated from successive differences, after von Neumann et al., "The Mean Square Successive
Difference" (1941). The median takes the place of the mean: a rank that becomes slow, and stays so, adds one difference.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean, median

PARTS = ("data", "forward", "backward", "rest")
"""Parts of a rank's own time."""
ROW = 3
"""Windows in a row over which a rank is slow, or is not slow any more."""
LASTS = 1.5
"""Seconds that a window lasts at least."""
ABOVE = 0.15
"""Share of the others' own time by which a slow rank's is longer."""
ENDS = 0.10
"""The share below which it is not slow any more."""
DEVIATIONS = 5.0
"""Robust deviations by which a slow rank's own time is longer."""
WORTH = 0.03
"""Share by which the job is slower, at least, for a rank to be named."""
RECENT = 30
"""Windows from which it is estimated how much ranks vary."""
FEW = 8
"""Differences as few as these double the estimate: it may be low by chance."""
_NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""
_PAIR, _MANY = 2, 32
_LEAST = 1e-6
"""Seconds that own times are taken to be at least: shares of nothing have no meaning."""


@dataclass(frozen=True)
class RankTimes:
    """Seconds per step of one rank in a window.

    Attributes:
        own: Outside of collectives.
        parts: Of each of `PARTS`, and in collectives.
    """

    own: float
    parts: tuple[float, ...]


@dataclass(frozen=True)
class SlowRank:
    """A rank that holds up the others.

    Attributes:
        part: The one of `PARTS` in which it loses most.
        cost: Share by which the job is slower.
        own: Seconds of a step that are its own, and ``others`` the median of those of the other ranks.
        number: The window in which it was found, or in which it was not slow any more.
    """

    rank: int
    part: str
    cost: float
    own: float
    others: float
    number: int


@dataclass(frozen=True)
class _Judged:
    """A window: its times, and for each rank by how many seconds, and by which share, its own time is above the median
    of the others, and the deviation of these in seconds.
    """

    number: int
    times: Mapping[int, RankTimes]
    excess: Mapping[int, float]
    above: Mapping[int, float]
    spread: Mapping[int, float]


class Stragglers:
    """The ranks that are slow, from one window of steps after the other.

    Args:
        steps: Steps of a window.
        seconds: The least that it lasts. Shorter ones are joined, and the median of their times is taken: a moment in
            which another process had the processor counts for little.

    Attributes:
        slow: Ranks that are slow now, by number.
    """

    def __init__(self, steps: int = 20, seconds: float = LASTS) -> None:
        self.slow: dict[int, SlowRank] = {}
        self._seconds = seconds / steps
        self._ranks: Set[int] = frozenset()
        self._joined = list[Mapping[int, RankTimes]]()
        self._seen: deque[_Judged] = deque(maxlen=RECENT)

    def see(self, number: int, times: Mapping[int, RankTimes]) -> tuple[list[SlowRank], list[SlowRank]]:
        """Take a window of all ranks, later than those before.

        Returns:
            Ranks that are slow from now on, and those that are not slow any more.
        """
        # 1. join windows that are too short   2. by how much each rank is above the others, in each of the last ones
        # 3. by how much it may be by chance   4. who is slow   5. the cost, by the slowest of those that are not
        if self._ranks != times.keys():
            self._ranks = times.keys()
            self._seen.clear()
            self._joined.clear()
        self._joined.append(times)
        if len(times) < 2 or sum(map(_duration, self._joined)) < self._seconds:
            return [], []
        times = {rank: _middle([each[rank] for each in self._joined]) for rank in times}
        self._joined.clear()
        self._seen.append(_judged(number, times))
        if len(self._seen) < ROW:
            return [], []
        last = [*self._seen][-ROW:]
        chance = self._chance()
        high = {
            rank
            for rank in times
            if min(each.above[rank] for each in last) > ABOVE
            and min(each.excess[rank] for each in last)
            > DEVIATIONS * max(chance, median(each.spread[rank] for each in last))
        }
        began = list[SlowRank]()
        for rank in sorted(high - self.slow.keys()):
            found = _described(rank, last, high)
            if found.cost >= WORTH:
                began.append(found)
        ended = [
            _described(rank, last, {rank})
            for rank in sorted(self.slow)
            if rank not in times or max(each.above[rank] for each in last) < ENDS
        ]
        self.slow |= {one.rank: one for one in began}
        for one in ended:
            del self.slow[one.rank]
        return began, ended

    def _chance(self) -> float:
        """The deviation of a rank's excess from one window to another, in seconds."""
        # Not of shares: of a rank that is slow they vary with all that the others do.
        pairs = zip([*self._seen], [*self._seen][1:], strict=False)
        differences = [abs(after.excess[rank] - before.excess[rank]) for before, after in pairs for rank in after.times]
        return _NORMAL / 2**0.5 * median(differences) * (1 + FEW / len(differences))


def _judged(number: int, times: Mapping[int, RankTimes]) -> _Judged:
    ordered = sorted(one.own for one in times.values())
    common = _deviation(ordered) if len(ordered) > _MANY else 0.0
    excess, above, spread = dict[int, float](), dict[int, float](), dict[int, float]()
    for rank, one in times.items():
        others = max(_LEAST, _median_without(ordered, one.own))
        excess[rank], above[rank] = one.own - others, one.own / others - 1
        # Of many, one more changes little; and to leave out each in turn would cost the square of their number.
        spread[rank] = common or _deviation(_without(ordered, one.own))
    return _Judged(number, times, excess, above, spread)


def _deviation(ordered: Sequence[float]) -> float:
    """Their median absolute deviation as a standard deviation; 0 of two, which are equally far from their median."""
    if len(ordered) <= _PAIR:
        return 0.0
    middle = _median(ordered)
    return _NORMAL * median(abs(own - middle) for own in ordered)


def _without(ordered: Sequence[float], value: float) -> list[float]:
    at = bisect_left(ordered, value)
    return [*ordered[:at], *ordered[at + 1 :]]


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of sorted values without one of them, in little time for many; 0 of none."""
    count, at = len(ordered) - 1, bisect_left(ordered, value)
    if not count:
        return 0.0
    low, high = (index + (index >= at) for index in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2


def _median(ordered: Sequence[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _described(rank: int, last: Sequence[_Judged], slow: Collection[int]) -> SlowRank:
    """A rank by the means of these windows, among ranks that are slow."""
    there = [each for each in last if rank in each.times] or [last[-1]]
    means = {other: _mean([each.times[other] for each in there]) for other in there[-1].times}
    own = means.get(rank, RankTimes(0.0, (0.0,) * (len(PARTS) + 1)))
    others = [times for other, times in means.items() if other != rank]
    losses = [own.parts[at] - median(times.parts[at] for times in others) for at in range(len(PARTS))]
    fine = [times.own for other, times in means.items() if other not in slow]
    lost = max(0.0, own.own - max(fine, default=own.own))
    step = median(sum(times.parts) for times in means.values())
    return SlowRank(
        rank,
        PARTS[losses.index(max(losses))],
        lost / max(_LEAST, step - lost),
        own.own,
        median(times.own for times in others),
        last[-1].number,
    )


def _duration(times: Mapping[int, RankTimes]) -> float:
    """Seconds of a step of the job: of its fastest rank, to which nothing else happened."""
    return min(sum(one.parts) for one in times.values())


def _middle(times: Sequence[RankTimes]) -> RankTimes:
    parts = zip(*(one.parts for one in times), strict=True)
    return RankTimes(median(one.own for one in times), tuple(map(median, parts)))


def _mean(times: Sequence[RankTimes]) -> RankTimes:
    parts = zip(*(one.parts for one in times), strict=True)
    return RankTimes(fmean(one.own for one in times), tuple(map(fmean, parts)))
