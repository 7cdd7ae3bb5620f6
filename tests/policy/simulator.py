"""Training as a sequence of iterations, with all that disturbs it: for tests of policies."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fastckpt.policy.frequency import Intervals, Profile
from fastckpt.policy.overhead import Iteration, measured
from fastckpt.policy.tuning import Decision, State, Terms, started, tuned


@dataclass(frozen=True)
class Competitor:
    """Another job: from one step to another, storage takes longer and persists disturb training more."""

    begins: int
    ends: int
    storage: float = 1.0
    slowdown: float = 0.0


@dataclass(frozen=True)
class Job:
    """What there is to simulate; times in seconds, alone on the machine."""

    iteration: float = 1.0
    noise: float = 0.0
    stall: float = 0.0
    storage: float = 0.0
    slowdown: float = 0.0
    competitor: Competitor | None = None
    pause: Callable[[int], float] = lambda step: 0.0
    hiccup: Callable[[int], float] = lambda step: 0.0
    drift: Callable[[int], float] = lambda step: 1.0
    waits: bool = True
    ranks: int = 1

    def profile(self) -> Profile:
        """What profiling would have found."""
        return Profile(self.iteration, self.iteration, self.stall, self.storage, 1)


@dataclass
class Run:
    """What came of it: per step the seconds that training takes by itself, and that it took; decisions; persists."""

    alone: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    persists: list[tuple[int, int]] = field(default_factory=list)
    in_flight: int = 0
    states: list[State] = field(default_factory=list)

    def overhead(self, first: int, last: int) -> float:
        """Part of the time that training takes by itself, from one step to another."""
        alone = sum(self.alone[first:last])
        return sum(self.taken[first:last]) / alone - 1

    def intervals(self, step: int) -> Intervals:
        """Those in force at a step."""
        return next(each.intervals for each in reversed(self.decisions) if each.step < step)

    @property
    def changes(self) -> list[Decision]:
        """The decisions that changed something, but the first."""
        return [each for each in self.decisions[1:] if each.changed]


class Storage:
    """One persist at a time, at a rate that others may lower."""

    def __init__(self, job: Job) -> None:
        self.job, self.left, self.began, self.since = job, 0.0, 0, 0.0
        self.durations: list[float] = []

    def begin(self, step: int, now: float) -> None:
        assert self.left <= 0, "two persists at once"
        self.left, self.began, self.since = max(self.job.storage, 1e-12), step, now

    def pass_time(self, seconds: float, factor: float, now: float) -> float:
        """Let time pass; the part of it in which a persist was under way."""
        if self.left <= 0:
            return 0.0
        needed = self.left * factor
        self.left -= seconds / factor
        if self.left > 0:
            return seconds
        self.left = 0.0
        self.durations.append(now + needed - self.since)
        return needed


def simulate(job: Job, terms: Terms | Intervals, steps: int, seed: int = 0) -> Run:
    """Run a job under a policy that adapts, or under given intervals."""
    rng, run, storage, now = random.Random(seed), Run(), Storage(job), 0.0
    adapts = isinstance(terms, Terms)
    if adapts:
        state, decision = started(job.profile(), terms)
        intervals = decision.intervals
        run.decisions.append(decision)
    else:
        intervals = terms
    window: list[list[Iteration]] = [[] for _ in range(job.ranks)]
    overruns, pending = 0, None
    for step in range(1, steps + 1):
        other = job.competitor
        competes = other is not None and other.begins <= step < other.ends
        factor, slowdown = (other.storage, job.slowdown + other.slowdown) if competes else (1.0, job.slowdown)
        stall, wait, snapshot = 0.0, 0.0, intervals.snapshots(step)
        if snapshot:
            stall = job.stall * max(0.0, 1 + job.noise * rng.gauss(0, 1)) + job.hiccup(step)
            if intervals.persists(step):
                if storage.left > 0:
                    overruns += 1
                    if job.waits:
                        wait = storage.left * factor
                        storage.pass_time(wait, factor, now)
                if storage.left <= 0:
                    run.persists.append((step, step))
                    storage.begin(step, now)
        run.in_flight = max(run.in_flight, 1 if storage.left > 0 else 0)
        persisting = storage.left > 0
        work = job.iteration * job.drift(step) * max(0.05, 1 + job.noise * rng.gauss(0, 1)) + job.pause(step)
        during = storage.pass_time(work, factor, now + stall + wait)
        slowed = work + slowdown * min(during, job.iteration * 2)
        now += slowed + stall + wait
        run.alone.append(work)
        run.taken.append(slowed + stall + wait)
        for rank in window:
            jitter = 1 + 0.001 * rng.gauss(0, 1) if job.ranks > 1 else 1.0
            rank.append(Iteration(slowed * jitter + stall + wait, stall, wait, snapshot, persisting))
        if adapts and step == state.ends:
            ranks = [measured(each, storage.durations, overruns) for each in window]
            rng.shuffle(ranks)
            state, pending = tuned(state, ranks)
            run.states.append(state)
            run.decisions.append(pending)
        if pending and step == pending.step:
            intervals, pending, overruns = pending.intervals, None, 0
            window = [[] for _ in range(job.ranks)]
            storage.durations = []
    return run
