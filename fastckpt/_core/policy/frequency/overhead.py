"""Measured costs of checkpoints: iterations with them compared with those without, in time and in processor time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean, median, median_high
from typing import Any, NamedTuple, Self

from fastckpt._core.policy.frequency.estimate import NOTHING, Estimate, difference, pool
from fastckpt._core.policy.frequency.intervals import SHORTEST, Costs, Intervals, whole_steps
from fastckpt.errors import ConfigError

PAUSE = 4.0
"""Median iterations that one counts for at most: beyond that the script does something else, such as evaluate."""
RECENT = 4
"""Windows that count as recent."""
ESTIMATES = ("stall", "plain", "snapshot", "slowdown", "snapshot_processor", "slowdown_processor")
FEW = 3
"""Iterations without checkpoints that are needed, at least, to compare others with."""
AFTER = 0.05
"""Seconds after a snapshot or a persist in which iterations count as its own: the saver commits, old files go."""


@dataclass(frozen=True)
class Iteration:
    """One step of training as a rank measured it, from the instant at which a snapshot begins if one is due.

    Attributes:
        seconds: Its duration, without phases that the script has marked as something else.
        stall: Seconds of it in which training waited for a snapshot.
        snapshot: True if a snapshot was made in it.
        persisting: True if a persist was under way in it.
        processor: Processor time that the rank and its part of the saver used in it, in seconds of the rank's part of
            the cores: as long as it would have been, had they used all of them.
    """

    seconds: float
    stall: float = 0.0
    snapshot: bool = False
    persisting: bool = False
    processor: float = 0.0

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
        snapshot: Seconds by which a snapshot delayed training: its stall, and the iterations that it slowed down.
        slowdown: Seconds by which an iteration took longer while a persist was under way.
        snapshot_processor: As ``snapshot``, of processor time.
        slowdown_processor: As ``slowdown``, of processor time.
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
    snapshot: Estimate = NOTHING
    slowdown: Estimate = NOTHING
    snapshot_processor: Estimate = NOTHING
    slowdown_processor: Estimate = NOTHING
    persisting: int = 0
    persists: int = 0
    durations: tuple[float, ...] = ()
    overruns: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values, to send to other ranks."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the result of `to_json`."""
        estimates = {name: Estimate(*values[name]) for name in ESTIMATES}
        return cls(**{**values, **estimates, "durations": tuple(values["durations"])})


def measured(
    iterations: Sequence[Iteration], durations: Iterable[float] = (), overruns: int = 0, *, busy: bool = False
) -> Measurement:
    """The measurement of these iterations of one rank; raises ConfigError if there are none.

    Iterations are compared with others of the same window, so a job that becomes slower by itself does not seem to be
    slowed down by checkpoints.

    Args:
        iterations: In order.
        durations: Seconds of each persist that has ended.
        overruns: Persists that were due before the previous one had ended.
        busy: True if no core was idle: processor time then counts as a part of training's, else of all cores'.
    """
    if not iterations:
        raise ConfigError("a window without iterations has no measurement; measure at least one")
    # 1. times without pauses   2. the kind of each iteration   3. those with compared with those without, in time
    # and in processor time
    most = PAUSE * median(each.work for each in iterations)
    work, kinds = [min(each.work, most) for each in iterations], _kinds(iterations)
    seen = _compared(kinds, work, [each.stall for each in iterations])
    # An evaluation that the script did not mark must not count as the cost of the save that it coincides with.
    used = [(kind, each.processor) for kind, each in zip(kinds, iterations, strict=True) if each.work <= most]
    processor = _compared([kind for kind, _ in used], [each for _, each in used], [0.0] * len(used))
    alone = [
        [s for k, s in zip(kinds, work, strict=True) if (k.snapshot > 0, k.persisting) == (is_snapshot, False)]
        for is_snapshot in (False, True)
    ]
    stall, ended = Estimate.of([each.stall for each in iterations if each.snapshot]), tuple(sorted(durations))
    persisting = sum(each.persisting for each in iterations)
    after = sum(kind.persisting for kind in kinds) / max(1, persisting)
    part = sum(each.processor for each in iterations) / max(SHORTEST, sum(each.seconds for each in iterations))
    weight = 1 / part if busy and 0 < part < 1 else 1.0
    return Measurement(
        iterations=len(iterations),
        iteration=max(SHORTEST, fmean(alone[0] or alone[1] or work)),
        pace=max(SHORTEST, fmean(work) + fmean(each.stall for each in iterations)),
        stall=stall,
        plain=seen.plain,
        snapshot=seen.snapshot if seen.snapshot.samples else stall,
        slowdown=seen.slowdown.times(after),
        snapshot_processor=processor.snapshot.times(weight),
        slowdown_processor=processor.slowdown.times(after * weight),
        persisting=persisting,
        persists=len(ended),
        durations=ended,
        overruns=overruns,
    )


class _Kind(NamedTuple):
    """The snapshot that an iteration belongs to, by its number, 0 for none; and whether it belongs to a persist."""

    snapshot: int
    persisting: bool


class _Costs(NamedTuple):
    """Iterations without a save; the addition of a snapshot to its own, and of a persist to each of its own."""

    plain: Estimate
    snapshot: Estimate
    slowdown: Estimate


def _kinds(iterations: Iterable[Iteration]) -> list[_Kind]:
    kinds, number, saved, persisted = [], 0, 0.0, 0.0
    for each in iterations:
        number += each.snapshot
        saved = AFTER if each.snapshot else saved - each.seconds
        persisted = AFTER if each.persisting else persisted - each.seconds
        kinds.append(_Kind(number if saved > 0 else 0, persisted > 0))
    return kinds


def _compared(kinds: Sequence[_Kind], seconds: Sequence[float], stalls: Sequence[float]) -> _Costs:
    alike: dict[tuple[bool, bool], list[float]] = {}  # seconds by (with a snapshot, with a persist)
    for kind, each in zip(kinds, seconds, strict=True):
        alike.setdefault((kind.snapshot > 0, kind.persisting), []).append(each)
    plain, slowdown = Estimate.of(alike.get((False, False), [])), _slowdown(alike)
    added: dict[int, list[float]] = {}  # seconds by snapshot
    for kind, each, stall in zip(kinds, seconds, stalls, strict=True):
        if kind.snapshot:
            usual = plain.mean + (slowdown.mean if kind.persisting else 0.0)
            added.setdefault(kind.snapshot, []).append(each + stall - usual)
    if plain.samples < FEW or not added:
        return _Costs(plain, NOTHING, slowdown)
    long = fmean(map(len, added.values()))
    return _Costs(plain, difference(Estimate.of([*map(sum, added.values())]), plain._replace(mean=0.0), long), slowdown)


def _slowdown(alike: Mapping[tuple[bool, bool], list[float]]) -> Estimate:
    """Seconds that a persist adds to an iteration: among those without snapshots, or with, whichever are more."""
    pairs = [(alike.get((snapshot, True), []), alike.get((snapshot, False), [])) for snapshot in (False, True)]
    # Like is compared with like: a snapshot's own slowdown must not be counted as the persist's.
    during, without = max(pairs, key=lambda pair: min(map(len, pair)))
    if not during or len(without) < FEW:
        return NOTHING
    return difference(Estimate.of(during), Estimate.of(without))


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
        snapshot=_greatest([_middle(each.snapshot for each in ranks), stall]),
        slowdown=_middle(each.slowdown for each in ranks),
        # Copies by one rank, or hashes by the saver, for all take cores from all.
        snapshot_processor=_mean(each.snapshot_processor for each in ranks),
        slowdown_processor=_mean(each.slowdown_processor for each in ranks),
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


def _mean(estimates: Iterable[Estimate]) -> Estimate:
    known = sorted(each for each in estimates if each.samples)
    # The samples of one: measurements of ranks in the same iterations are not independent.
    return pool(known)._replace(samples=known[0].samples) if known else NOTHING


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
    """The measurement, with gaps filled from the one before."""
    gaps = {name: getattr(before, name) for name in ESTIMATES if not getattr(seen, name).samples}
    return replace(seen, **gaps, durations=seen.durations or before.durations)


def paid(seen: Measurement, intervals: Intervals) -> float:
    """The part of training time that checkpoints cost."""
    return costs(seen).overhead(intervals)


def error(seen: Measurement, intervals: Intervals) -> float:
    """The standard error of that part; one disturbance makes both costs seem high, so their errors add up."""
    return costs(seen, 1.0).overhead(intervals) - paid(seen, intervals)


def _during(seen: Measurement) -> float:
    """Iterations in which a persist is under way: as counted, within an iteration of its duration."""
    if not seen.durations:
        return 0.0
    least = whole_steps(median(seen.durations) / seen.pace)
    return min(max(seen.persisting / seen.persists, least), least + 1) if seen.persists else least


def costs(seen: Measurement, errors: float = 0.0) -> Costs:
    """Costs in time or in processor time, whichever are more; so many standard errors above the mean.

    Processor time that saves take counts as if it kept all cores that training uses, or all that there are where some
    are idle: little among many cores.
    """
    snapshot = max(0.0, *(each.above(errors) for each in (seen.snapshot, seen.snapshot_processor)))
    slowdown = max(0.0, *(each.above(errors) for each in (seen.slowdown, seen.slowdown_processor)))
    persist = slowdown * _during(seen) if slowdown else 0.0
    return Costs(seen.iteration, snapshot, persist, longest(seen.durations))


def longest(durations: Sequence[float]) -> float:
    """The longest duration; of three or more the second: one may be an accident."""
    return sorted(durations)[-2 if len(durations) >= 3 else -1] if durations else 0.0
