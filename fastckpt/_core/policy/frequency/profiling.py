"""How long to profile a job, and what its first iterations say of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median, median_high

from fastckpt._core.policy.frequency.estimate import difference
from fastckpt._core.policy.frequency.intervals import Profile
from fastckpt._core.policy.frequency.overhead import FEW, Iteration, measured
from fastckpt.errors import ConfigError

MOST, FEWEST = 50, 8
"""Iterations that are profiled, at most and at least."""
PART = 0.01
"""Part of an epoch that is profiled."""
EARLY, PATIENCE = 6, 60.0
"""No more iterations are profiled than fit into so many seconds, but so many at least."""
COPIES = 3
"""Snapshots that are profiled, at least: the first ones take memory that nobody had before."""
WARM_UP = 2
"""First iterations that never count: state is made, code compiled."""
FAR = 5.0
"""Median deviations from the median beyond which an iteration at the beginning is part of the warm-up."""
CONSISTENT = 1.4826
"""Times the median absolute deviation is the standard deviation, of what is normally distributed."""


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

    What is far slower is told by the later half. Of a few all that is left of them is taken.
    """
    later = seconds[len(seconds) // 2 :]
    slow = median(later) + FAR * max(deviation(later), 0.01 * median(later))
    first = min(WARM_UP, len(seconds) - 1)
    while first < len(seconds) // 2 and seconds[first] > slow:
        first += 1
    return seconds[first:]


@dataclass(frozen=True)
class ProfileSamples:
    """What a rank measured while it profiled: seconds, one per iteration or per copy, in order.

    Attributes:
        iterations: Whole iterations.
        updates: Of each, the update of the weights.
        host_copies: Copies of the state into host memory.
        persists: Ways of the state from there to storage.
        blocks: Of each host copy, that part behind which training cannot go on; empty if there is none.
        slowed: Whole iterations while a persist was under way; empty if it ended too soon to tell.
        copied: Iterations in which a snapshot was copied, without the time that training waited for it.
    """

    iterations: Sequence[float]
    updates: Sequence[float]
    host_copies: Sequence[float]
    persists: Sequence[float]
    blocks: Sequence[float] = ()
    slowed: Sequence[float] = ()
    copied: Sequence[float] = ()


def profiled(samples: ProfileSamples) -> Profile:
    """The profile by medians, which a pause of one iteration, or the first copy into fresh memory, does not move.

    Raises ConfigError if something was not measured.
    """
    for name in ("iterations", "updates", "host_copies", "persists"):
        if not getattr(samples, name):
            raise ConfigError(f"{name} of a profile are empty; measure each at least once")
    iteration = median(settled(samples.iterations))
    update = median(settled(samples.updates))
    return Profile(
        iteration=iteration,
        update=min(update, iteration),
        host_copy=median(samples.host_copies),
        storage=median(samples.persists),
        blocked=median(samples.blocks) if samples.blocks else 0.0,
        slowdown=_slowdown(samples),
        copy_slowdown=_copy_slowdown(samples),
    )


def _slowdown(samples: ProfileSamples) -> float:
    """By means, for a persist may slow down few iterations, and those much."""
    plain = [Iteration(seconds) for seconds in settled(samples.iterations)]
    slowed = [Iteration(seconds, persisting=True) for seconds in samples.slowed]
    return max(0.0, measured(plain + slowed).slowdown.mean)


def _copy_slowdown(samples: ProfileSamples) -> float:
    """What is beyond doubt of it: where iterations vary by more, a copy in the background is not what they wait for."""
    plain = [Iteration(seconds) for seconds in settled(samples.iterations)]
    seen = measured(plain + [Iteration(seconds, snapshot=True) for seconds in samples.copied])
    if min(seen.plain.samples, seen.busy.samples) < FEW:
        return 0.0
    longer = difference(seen.busy, seen.plain)
    return max(0.0, longer.mean - longer.error)


def joined(ranks: Sequence[Profile]) -> Profile:
    """One profile for all ranks, in whatever order they come: of copies the slowest."""
    if not ranks:
        raise ConfigError("no rank has made a profile; give that of each")
    iteration = median(each.iteration for each in ranks)
    return Profile(
        iteration=iteration,
        update=min(iteration, max(each.update for each in ranks)),
        host_copy=max(each.host_copy for each in ranks),
        storage=max(each.storage for each in ranks),
        blocked=max(each.blocked for each in ranks),
        slowdown=median_high(each.slowdown for each in ranks),
        copy_slowdown=median_high(each.copy_slowdown for each in ranks),
    )


@dataclass(frozen=True)
class ProfilingProgress:
    """What is known of a job that is being profiled, and on how much that rests.

    Attributes:
        profile: What was measured so far; what was not is 0.
        iterations: Those without a persist that were measured.
        snapshots: How many.
        persists: How many have ended.
        plain: Iterations without a save or a persist that were measured.
    """

    profile: Profile
    iterations: int = 0
    snapshots: int = 0
    persists: int = 0
    plain: int = 0

    @property
    def compared(self) -> bool:
        """Whether enough iterations without a save are known to compare others with."""
        return self.plain >= FEWEST

    def needed(self, most: int) -> int:
        """Iterations to profile of a job that need not profile more than ``most``."""
        return min(most, max(EARLY, int(min(most, PATIENCE / self.profile.iteration))))

    def complete(self, most: int) -> bool:
        """Whether intervals can be chosen."""
        return self.iterations >= self.needed(most) and self.snapshots >= COPIES and self.persists > 0


def agreed(ranks: Sequence[ProfilingProgress | None]) -> ProfilingProgress | None:
    """The progress of all ranks; None as long as some have measured nothing."""
    known = [each for each in ranks if each is not None]
    if len(known) < len(ranks):
        return None
    counts = (
        min(counts) for counts in zip(*((p.iterations, p.snapshots, p.persists, p.plain) for p in known), strict=True)
    )
    return ProfilingProgress(joined([each.profile for each in known]), *counts)


def continued(before: ProfilingProgress | None, since: ProfilingProgress | None) -> ProfilingProgress | None:
    """What a run has measured, together with what the runs before it had: each counts for what it rests on."""
    if before is None or since is None:
        return before or since

    def mean(name: str, count: str) -> float:
        weights: tuple[int, int] = getattr(before, count), getattr(since, count)
        values: tuple[float, float] = getattr(before.profile, name), getattr(since.profile, name)
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights) if any(weights) else values[1]

    iteration = mean("iteration", "iterations")
    profile = replace(
        since.profile,
        iteration=iteration,
        update=min(iteration, mean("update", "iterations")),
        slowdown=mean("slowdown", "iterations"),
        copy_slowdown=mean("copy_slowdown", "iterations"),
        host_copy=mean("host_copy", "snapshots"),
        blocked=mean("blocked", "snapshots"),
        storage=mean("storage", "persists"),
    )
    return ProfilingProgress(
        profile,
        before.iterations + since.iterations,
        before.snapshots + since.snapshots,
        before.persists + since.persists,
        before.plain + since.plain,
    )
