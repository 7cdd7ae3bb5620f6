"""Measured costs of checkpoints: iterations with them compared with those without."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean, median, median_high
from typing import Any, Self

from fastckpt._core.policy.frequency.estimate import NOTHING, Estimate, difference, pool
from fastckpt._core.policy.frequency.intervals import SHORTEST, Costs, Intervals, whole_steps
from fastckpt.errors import ConfigError

PAUSE = 4.0
"""Median iterations that one counts for at most: beyond that the script does something else, such as evaluate."""
RECENT = 4
"""Windows that count as recent."""
ESTIMATES = ("stall", "plain", "busy", "snapshot", "slowdown")
FEW = 3
"""Iterations without checkpoints that are needed, at least, to compare others with."""


@dataclass(frozen=True)
class Iteration:
    """One step of training as a rank measured it, from the instant at which a snapshot begins if one is due.

    Attributes:
        seconds: Its duration, without phases that the script has marked as something else.
        stall: Seconds of it in which training waited for a snapshot.
        snapshot: Whether a snapshot was made in it.
        persisting: Whether a persist was under way in it.
    """

    seconds: float
    stall: float = 0.0
    snapshot: bool = False
    persisting: bool = False

    def __post_init__(self) -> None:
        if not (isfinite(self.seconds) and self.stall >= 0 and self.work >= -SHORTEST):
            raise ConfigError(
                f"an iteration took {self.seconds} s, {self.stall} s of them stalled; measure finite times, "
                "these a part of the whole"
            )

    @property
    def work(self) -> float:
        """Seconds of it in which training did not wait."""
        return self.seconds - self.stall


@dataclass(frozen=True)
class Measurement:
    """Measurements of one rank in a window of iterations; or of all ranks together.

    Attributes:
        iterations: Their number.
        iteration: Seconds of one without any checkpoint; of one without a persist if each has a snapshot.
        pace: Seconds of one as it is, with checkpoints.
        stall: Seconds that training waited for a snapshot.
        plain: Seconds of an iteration without snapshot or persist.
        busy: Seconds of one with a snapshot and no persist, its stall left out.
        snapshot: Seconds by which a snapshot delayed training: its stall, and the iteration that it slowed down.
        slowdown: Seconds by which an iteration took longer while a persist was under way.
        persisting: Iterations in which a persist was under way.
        persists: Persists that ended.
        durations: Seconds that each of them took, from the beginning of its snapshot.
        overruns: Persists that were due before the previous one had ended.
    """

    iterations: int
    iteration: float
    pace: float
    stall: Estimate = NOTHING
    plain: Estimate = NOTHING
    busy: Estimate = NOTHING
    snapshot: Estimate = NOTHING
    slowdown: Estimate = NOTHING
    persisting: int = 0
    persists: int = 0
    durations: tuple[float, ...] = ()
    overruns: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain values, to send to other ranks."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the result of `to_json`."""
        estimates = {name: Estimate(*values[name]) for name in ESTIMATES}
        return cls(**{**values, **estimates, "durations": tuple(values["durations"])})


def measured(iterations: Sequence[Iteration], durations: Iterable[float] = (), overruns: int = 0) -> Measurement:
    """The measurement of these iterations of one rank; raises ConfigError if there are none.

    Iterations are compared with others of the same window, so a job that becomes slower by itself does not seem to be
    slowed down by checkpoints.
    """
    if not iterations:
        raise ConfigError("a window without iterations has no measurement; measure at least one")
    work = _work(iterations)
    kinds: dict[tuple[bool, bool], list[float]] = {}  # seconds by (with a snapshot, with a persist under way)
    for each, seconds in zip(iterations, work, strict=True):
        kinds.setdefault((each.snapshot, each.persisting), []).append(seconds)
    slowdown, ended = _slowdown(kinds), tuple(sorted(durations))
    alone = kinds.get((False, False)) or kinds.get((True, False)) or work
    stall = Estimate.of([each.stall for each in iterations if each.snapshot])
    plain = Estimate.of(kinds.get((False, False), []))
    return Measurement(
        iterations=len(iterations),
        iteration=max(SHORTEST, fmean(alone)),
        pace=max(SHORTEST, fmean(work) + fmean(each.stall for each in iterations)),
        stall=stall,
        plain=plain,
        busy=Estimate.of(kinds.get((True, False), [])),
        snapshot=_snapshot(iterations, work, plain, slowdown) or stall,
        slowdown=slowdown,
        persisting=sum(each.persisting for each in iterations),
        persists=len(ended),
        durations=ended,
        overruns=overruns,
    )


def _work(iterations: Sequence[Iteration]) -> list[float]:
    """Seconds of work of each iteration, without pauses."""
    # An evaluation that the script did not mark must not count as the cost of the save that it coincides with.
    most = PAUSE * median(each.work for each in iterations)
    return [min(each.work, most) for each in iterations]


def _slowdown(kinds: Mapping[tuple[bool, bool], list[float]]) -> Estimate:
    """Seconds that a persist adds to an iteration: among those without snapshots, or with, whichever are more."""
    pairs = [(kinds.get((snapshot, True), []), kinds.get((snapshot, False), [])) for snapshot in (False, True)]
    # Like is compared with like: a snapshot's own slowdown must not be counted as the persist's.
    during, without = max(pairs, key=lambda pair: min(map(len, pair)))
    if not during or len(without) < FEW:
        return NOTHING
    return difference(Estimate.of(during), Estimate.of(without))


def _snapshot(
    iterations: Sequence[Iteration], work: Sequence[float], alone: Estimate, slowdown: Estimate
) -> Estimate | None:
    """Seconds that a snapshot adds to its iteration; None if there are too few without one."""
    extra = [
        each.stall + seconds - alone.mean - (slowdown.mean if each.persisting else 0.0)
        for each, seconds in zip(iterations, work, strict=True)
        if each.snapshot
    ]
    if alone.samples < FEW or not extra:
        return None
    return difference(Estimate.of(extra), alone._replace(mean=0.0))


def joined(ranks: Sequence[Measurement]) -> Measurement:
    """The measurement of all ranks together, in any order; raises ConfigError if there is none.

    Ranks wait for each other, so the iterations of each show the cost of checkpoints for the job: the upper median is
    taken. Stalls and durations show only on the rank where they happen: of these the longest are taken.
    """
    if not ranks:
        raise ConfigError("no rank has measured anything; give the measurement of each")
    stall = _greatest(each.stall for each in ranks)
    return Measurement(
        iterations=max(each.iterations for each in ranks),
        iteration=median_high(each.iteration for each in ranks),
        pace=median_high(each.pace for each in ranks),
        stall=stall,
        plain=_middle(each.plain for each in ranks),
        busy=_middle(each.busy for each in ranks),
        snapshot=_greatest([_middle(each.snapshot for each in ranks), stall]),
        slowdown=_middle(each.slowdown for each in ranks),
        persisting=max(each.persisting for each in ranks),
        persists=max(each.persists for each in ranks),
        # All of one rank's durations, not a mixture: a persist is as long as its slowest part.
        durations=max((each.durations for each in ranks), key=lambda durations: (sum(durations), durations)),
        overruns=max(each.overruns for each in ranks),
    )


def _by_mean(estimate: Estimate) -> tuple[float, Estimate]:
    return estimate.mean, estimate


def _middle(estimates: Iterable[Estimate]) -> Estimate:
    known = sorted((each for each in estimates if each.samples), key=_by_mean)
    return known[len(known) // 2] if known else NOTHING


def _greatest(estimates: Iterable[Estimate]) -> Estimate:
    return max((each for each in estimates if each.samples), key=_by_mean, default=NOTHING)


def pooled(windows: Sequence[Measurement]) -> Measurement:
    """The measurement of several windows together, at least one; of durations those of the last `RECENT`."""
    return Measurement(
        iterations=sum(each.iterations for each in windows),
        iteration=fmean(each.iteration for each in windows),
        pace=fmean(each.pace for each in windows),
        persisting=sum(each.persisting for each in windows),
        persists=sum(each.persists for each in windows),
        durations=tuple(sorted(duration for each in windows[-RECENT:] for duration in each.durations)),
        overruns=sum(each.overruns for each in windows),
        **{name: pool(getattr(each, name) for each in windows) for name in ESTIMATES},
    )


def completed(seen: Measurement, before: Measurement) -> Measurement:
    """The measurement, with gaps filled from what was known before.

    Where every iteration has a snapshot, its cost is the difference from earlier iterations.
    """
    snapshot, iteration = seen.snapshot if seen.snapshot.samples else before.snapshot, seen.iteration
    if seen.plain.samples < FEW <= min(seen.busy.samples, seen.stall.samples) and before.plain.samples:
        added, iteration = difference(seen.busy, before.plain), before.plain.mean
        snapshot = _greatest([added._replace(mean=added.mean + seen.stall.mean), seen.stall])
    return replace(
        seen,
        iteration=iteration,
        stall=seen.stall if seen.stall.samples else before.stall,
        plain=seen.plain if seen.plain.samples >= FEW else before.plain,
        snapshot=snapshot,
        slowdown=seen.slowdown if seen.slowdown.samples else before.slowdown,
        durations=seen.durations or before.durations,
    )


def paid(seen: Measurement, intervals: Intervals) -> float:
    """The part of training time that checkpoints cost."""
    return costs(seen).overhead(intervals)


def error(seen: Measurement, intervals: Intervals) -> float:
    """The standard error of that part; one disturbance makes both costs seem high, so their errors add up."""
    snapshot = seen.snapshot.error / intervals.memory if seen.snapshot.samples else 0.0
    persist = seen.slowdown.error * _during(seen) / intervals.storage if seen.slowdown.samples else 0.0
    return (snapshot + persist) / seen.iteration


def _during(seen: Measurement) -> float:
    """Iterations in which a persist is under way: as counted, within an iteration of what its duration implies."""
    if not seen.durations:
        return 0.0
    least = whole_steps(median(seen.durations) / seen.pace)
    return min(max(seen.persisting / seen.persists, least), least + 1) if seen.persists else least


def costs(seen: Measurement, errors: float = 0.0) -> Costs:
    """Costs from a measurement; so many standard errors above the mean."""
    slowdown, snapshot = (max(0.0, _above(each, errors)) for each in (seen.slowdown, seen.snapshot))
    persist = slowdown * _during(seen) if slowdown else 0.0
    return Costs(seen.iteration, snapshot, persist, longest(seen.durations))


def _above(estimate: Estimate, errors: float) -> float:
    return estimate.mean + errors * estimate.error if errors and estimate.samples else estimate.mean


def longest(durations: Sequence[float]) -> float:
    """The longest duration; of three or more the second: one may be an accident."""
    return sorted(durations)[-2 if len(durations) >= 3 else -1] if durations else 0.0
