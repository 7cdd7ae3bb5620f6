"""Training as a sequence of iterations, with all that disturbs it: for tests of policies."""

import random
from dataclasses import dataclass, field, replace
from math import ceil

from fastckpt._core.policy.frequency.intervals import SHORTEST, Intervals
from fastckpt._core.policy.frequency.overhead import Iteration, Measurement, measured
from fastckpt._core.policy.frequency.profiling import Profile, profiled
from fastckpt._core.policy.frequency.tuning import Decision, Terms, started, tuned

PROFILED = 50
"""Iterations of a profile without a checkpoint."""


@dataclass(frozen=True)
class Competitor:
    """Another job: from one step to another storage is so many times slower, and a persist slows down more."""

    begins: int
    ends: int
    storage: float = 1.0
    slowdown: float = 0.0


@dataclass(frozen=True)
class Job:
    """What there is to simulate; times in seconds, alone on the machine.

    Attributes:
        iteration: One iteration; `noise` is its standard deviation, and that of stalls, as a part of it.
        stall: What training waits for a snapshot.
        storage: What a persist takes.
        slowdown: By which part an iteration is slower while a persist is under way.
        competitor: Another job.
        ranks: How many measure; each sees its own noise, of a thousandth.
    """

    iteration: float = 1.0
    noise: float = 0.0
    stall: float = 0.0
    storage: float = 0.0
    slowdown: float = 0.0
    competitor: Competitor | None = None
    ranks: int = 1

    def profile(self, rng: random.Random) -> Profile:
        """What profiling would have found: nothing to hide a snapshot behind."""
        plain = [self.alone(rng) for _ in range(PROFILED)]
        slowed = [self.alone(rng) * (1 + self.now(1)[1]) for _ in range(ceil(self.storage / self.iteration))]
        stall = self.stall or SHORTEST
        iterations = [Iteration(seconds) for seconds in plain] + [
            Iteration(seconds, 0.0, False, True) for seconds in slowed
        ]
        found = profiled([*iterations, Iteration(stall + self.iteration, stall, True)], [self.storage])
        assert found is not None
        return replace(found, iteration=self.iteration, stall=self.stall, duration=self.stall + self.storage)

    def alone(self, rng: random.Random) -> float:
        """Seconds of an iteration without any checkpoint."""
        return self.iteration * self.noisy(rng)

    def noisy(self, rng: random.Random) -> float:
        return max(0.05, 1 + self.noise * rng.gauss(0, 1)) if self.noise else 1.0

    def now(self, step: int) -> tuple[float, float]:
        """How many times slower storage is at a step, and the slowdown of a persist."""
        other = self.competitor
        if other is not None and other.begins <= step < other.ends:
            return other.storage, self.slowdown + other.slowdown
        return 1.0, self.slowdown


@dataclass
class Storage:
    """One persist at a time; each is durable when all of its work is done, at a rate that others may lower."""

    left: float = 0.0
    took: float = 0.0
    durations: list[float] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return self.left > 0

    def begin(self, work: float) -> None:
        assert not self.busy, "two persists at once"
        self.left, self.took = max(work, 1e-9), 0.0

    def let_pass(self, seconds: float, factor: float) -> float:
        """Let time pass; the part of it in which a persist was under way."""
        if not self.busy:
            return 0.0
        part = min(seconds, self.left * factor)
        self.took += part
        self.left = self.left - part / factor if part < self.left * factor else 0.0
        if not self.busy:
            self.durations.append(self.took)
        return part


@dataclass
class Run:
    """What came of a job: of each iteration what it takes alone and what it took; and the decisions."""

    alone: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    storage: Storage = field(default_factory=Storage)

    def overhead(self, first: int, last: int | None = None) -> float:
        """By which part the iterations from one to another took longer than by themselves."""
        return sum(self.taken[first:last]) / sum(self.alone[first:last]) - 1

    @property
    def changes(self) -> list[Decision]:
        """The decisions that changed something, but the first."""
        return [each for each in self.decisions[1:] if each.changed]


class Simulation:
    """A job under a policy that adapts, or under given intervals."""

    def __init__(self, job: Job, policy: Terms | Intervals, seed: int = 0) -> None:
        self.job, self.policy, self.rng, self.run = job, policy, random.Random(seed), Run()
        self.windows: list[list[Iteration]] = [[] for _ in range(job.ranks)]
        self.overruns, self.step, self.owed = 0, 0, False
        self.pending: Decision | None = None
        if isinstance(policy, Terms):
            self.state, decision = started(job.profile(self.rng), policy, self.step)
            self.intervals = decision.intervals
            self.run.decisions.append(decision)
        else:
            self.intervals = policy

    def _clear(self) -> None:
        self.windows = [[] for _ in self.windows]
        self.overruns, self.run.storage.durations, self.pending = 0, [], None

    def go(self, iterations: int) -> Run:
        for _ in range(iterations):
            self.step += 1
            self._iterate()
            if isinstance(self.policy, Terms):
                self._tune()
        return self.run

    def _iterate(self) -> None:
        job, step, storage = self.job, self.step, self.run.storage
        factor, slowdown = job.now(step)
        snapshot = self.intervals.snapshots(step)
        stall = job.stall * job.noisy(self.rng) if snapshot else 0.0
        if snapshot:
            self._persist(self.intervals.persists(step))
        persisting = storage.busy
        storage.let_pass(stall, factor)
        alone = job.alone(self.rng)
        slowed = alone + storage.let_pass(alone * (1 + slowdown), factor) * slowdown / (1 + slowdown)
        self.run.alone.append(alone)
        self.run.taken.append(slowed + stall)
        for window in self.windows:
            seen = slowed * (1 + 0.001 * self.rng.gauss(0, 1)) if job.ranks > 1 else slowed
            window.append(Iteration(seen + stall, stall, snapshot, persisting, alone))

    def _persist(self, due: bool) -> None:
        """Begin a persist with this snapshot, if one is due, or was put off because one was under way."""
        if not (due or self.owed):
            return
        self.overruns += self.run.storage.busy and not self.owed
        self.owed = self.run.storage.busy
        if not self.owed:
            self.run.storage.begin(self.job.storage)

    def _tune(self) -> None:
        if self.step == self.state.ends:
            ranks: list[Measurement] = [
                measured(window, self.run.storage.durations, self.overruns) for window in self.windows
            ]
            self.rng.shuffle(ranks)
            self.state, self.pending = tuned(self.state, ranks)
            self.run.decisions.append(self.pending)
        if self.pending and self.step == self.pending.step:
            self.intervals = self.pending.intervals
            self._clear()


def simulate(job: Job, policy: Terms | Intervals, iterations: int, seed: int = 0) -> Run:
    """Run a job for so many iterations."""
    return Simulation(job, policy, seed).go(iterations)
