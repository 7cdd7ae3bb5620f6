"""The profile of a job: the times of its first iterations and saves, and how many of them to measure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from statistics import median, median_high
from typing import Any

from fastckpt._core.policy.frequency.intervals import SHORTEST
from fastckpt._core.policy.frequency.overhead import FEW, Iteration, Measurement, measured
from fastckpt.errors import ConfigError

COUNTS = ("iterations", "snapshots", "persists", "plain")
"""Fields of a profile with the number of measurements that it rests on."""
MOST, FEWEST = 50, 8
"""Iterations that are profiled, at most and at least."""
PART = 0.01
"""Part of an epoch that is profiled."""
EARLY, PATIENCE = 6, 60.0
"""Iterations that are profiled at least, and the seconds into which further ones must fit."""
COPIES = 3
"""Snapshots that are profiled, at least: the first ones fault in memory and are slower."""
WARM_UP = 2
"""First iterations that never count: state is made, code compiled."""
FAR = 5.0
"""Median deviations from the median beyond which an iteration at the beginning is part of the warm-up."""
CONSISTENT = 1.4826
"""The ratio of standard deviation to median absolute deviation of a normal distribution."""


def length(epoch: int | None = None) -> int:
    """Iterations to profile: 1% of an epoch's, from `FEWEST` to `MOST` (CheckFreq, FAST'21, section 4.4).

    Args:
        epoch: Iterations of an epoch; None if that is not known.
    """
    if epoch is None:
        return MOST
    if epoch < 1:
        raise ConfigError(f"an epoch has {epoch} iterations; give 1 or more, or None if that is not known")
    return min(MOST, max(FEWEST, ceil(PART * epoch)))


def deviation(values: Sequence[float]) -> float:
    """The spread of values around their median, by the median absolute deviation."""
    middle = median(values)
    return CONSISTENT * median(abs(value - middle) for value in values)


def settled(seconds: Sequence[float]) -> Sequence[float]:
    """The times without the warm-up before them: `WARM_UP` iterations, and those after them that are still far slower.

    The later half defines the usual time. At least one time is left.
    """
    later = seconds[len(seconds) // 2 :]
    # At least 1% of the median: with a deviation near 0 every time would be far away.
    slow = median(later) + FAR * max(deviation(later), 0.01 * median(later))
    first = min(WARM_UP, len(seconds) - 1)
    while first < len(seconds) // 2 and seconds[first] > slow:
        first += 1
    return seconds[first:]


@dataclass(frozen=True)
class Profile:
    """Measurements of a job before its intervals are chosen, and the number of samples behind each.

    Attributes:
        iteration: Seconds of an iteration without any checkpoint.
        stall: Seconds that training waits for a snapshot.
        duration: Seconds from the beginning of a persisted snapshot until it is durable; 0 as long as none was.
        slowdown: Seconds by which an iteration takes longer while a checkpoint is persisted.
        copy_slowdown: Seconds by which it takes longer while a snapshot is copied in the background, beyond the stall.
        iterations: Iterations without a persist that were measured.
        snapshots: Snapshots that were measured.
        persists: Persists that have ended.
        plain: Iterations without a save or a persist that were measured.
    """

    iteration: float
    stall: float
    duration: float
    slowdown: float = 0.0
    copy_slowdown: float = 0.0
    iterations: int = 0
    snapshots: int = 0
    persists: int = 0
    plain: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{name} of a profile is {value}; measure a finite number, 0 or more")
        if self.iteration < SHORTEST:
            raise ConfigError(
                f"an iteration takes {self.iteration} s; at least {SHORTEST:g} s can be. Profile iterations that train"
            )

    @property
    def compared(self) -> bool:
        """Return whether enough iterations without a save are known to compare others with."""
        return self.plain >= FEWEST

    def needed(self, most: int) -> int:
        """Iterations to profile of a job that need not profile more than ``most``."""
        return min(most, max(EARLY, int(min(most, PATIENCE / self.iteration))))

    def complete(self, most: int) -> bool:
        """Return whether intervals can be chosen."""
        return self.iterations >= self.needed(most) and self.snapshots >= COPIES and self.persists > 0


def profiled(iterations: Sequence[Iteration], durations: Sequence[float], *, busy: bool = False) -> Profile | None:
    """The profile of one rank, by medians, which a pause of one iteration, or the first copy, does not move.

    If fewer than `FEW` iterations are without a save and a persist, others are used instead.

    Args:
        iterations: The measured iterations, in order.
        durations: Seconds of each persist that has ended.
        busy: True if no core was idle.

    Returns:
        None as long as no snapshot was measured.
    """
    kinds: dict[tuple[bool, bool], list[Iteration]] = {(s, p): [] for s in (False, True) for p in (False, True)}
    for each in iterations:
        kinds[each.snapshot, each.persisting].append(replace(each, seconds=max(SHORTEST, each.work), stall=0.0))
    stalls = [each.stall for each in iterations if each.snapshot]
    plain, copied, slowed = kinds[False, False], kinds[True, False], kinds[False, True]
    alone = plain if len(plain) >= FEW else copied or plain or slowed or kinds[True, True]
    if not stalls:
        return None
    normal = alone[-len(settled([each.seconds for each in alone])) :]
    return Profile(
        iteration=median(each.seconds for each in normal),
        stall=median(stalls),
        duration=median(durations) if durations else 0.0,
        slowdown=_slowdown(measured([*normal, *slowed], busy=busy)),
        copy_slowdown=_copy_slowdown(measured([*normal, *copied], busy=busy), median(stalls)),
        iterations=sum(not each.persisting for each in iterations),
        snapshots=len(stalls),
        persists=len(durations),
        plain=len(plain),
    )


def _slowdown(seen: Measurement) -> float:
    """The slowdown by a persist, from means: it may slow down few iterations, and those much."""
    return max(0.0, seen.slowdown.mean, seen.slowdown_processor.mean)


def _copy_slowdown(seen: Measurement, stall: float) -> float:
    """The slowdown by a copy, a standard error above the mean: a possible cost counts as one.

    Its processor time includes that of the stall.
    """
    if min(seen.plain.samples, seen.stall.samples) < FEW:
        return 0.0
    return max(0.0, seen.snapshot.above(1.0), seen.snapshot_processor.above(1.0) - stall)


def joined(ranks: Sequence[Profile | None]) -> Profile | None:
    """One profile for all ranks, in any order, with the slowest saves; None until all have measured."""
    known = [each for each in ranks if each is not None]
    if len(known) < len(ranks):
        return None

    def of(name: str, choose: Callable[[list[Any]], Any]) -> Any:
        return choose([getattr(each, name) for each in known])

    return Profile(
        iteration=of("iteration", median),
        stall=of("stall", max),
        duration=of("duration", max),
        slowdown=of("slowdown", median_high),
        copy_slowdown=of("copy_slowdown", median_high),
        # The least of all counts: the joined profile is complete only when every rank's is.
        **{name: of(name, min) for name in COUNTS},
    )


def continued(before: Profile | None, since: Profile | None) -> Profile | None:
    """A profile of this run joined with that of earlier runs, weighted by their numbers of measurements."""
    if before is None or since is None:
        return before or since

    def mean(name: str, count: str) -> float:
        weights: tuple[int, int] = getattr(before, count), getattr(since, count)
        values: tuple[float, float] = getattr(before, name), getattr(since, name)
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights) if any(weights) else values[1]

    return Profile(
        iteration=mean("iteration", "iterations"),
        stall=mean("stall", "snapshots"),
        duration=mean("duration", "persists"),
        slowdown=mean("slowdown", "iterations"),
        copy_slowdown=mean("copy_slowdown", "iterations"),
        **{name: getattr(before, name) + getattr(since, name) for name in COUNTS},
    )
