"""Simulated jobs: the overhead is kept to, and intervals settle, whatever the job is like."""

import math
import random
from dataclasses import dataclass, field, replace

from fastckpt._core.policy.frequency.intervals import SHORTEST, Costs, Intervals, fit
from fastckpt._core.policy.frequency.overhead import Iteration, measured
from fastckpt._core.policy.frequency.profiling import Profile, profiled
from fastckpt._core.policy.frequency.tuning import Decision, Terms, started, tuned

PROFILED = 50
"""Iterations of a profile without a checkpoint."""
FOREVER = 10**9


@dataclass(frozen=True)
class Job:
    """What there is to simulate; times in seconds, alone on the machine.

    Attributes:
        iteration: One iteration; `noise` is its standard deviation, and that of stalls, as a part of it.
        stall: What training waits for a snapshot.
        storage: What a persist takes.
        slowdown: By which part an iteration is slower while a persist is under way.
        competes: From and up to which step another job makes storage `slower` and adds to the slowdown.
        ranks: How many measure; each sees its own noise, of a thousandth.
    """

    iteration: float = 1.0
    noise: float = 0.0
    stall: float = 0.0
    storage: float = 0.0
    slowdown: float = 0.0
    competes: tuple[int, int] = (0, 0)
    slower: float = 1.0
    more_slowdown: float = 0.0
    ranks: int = 1

    def profile(self, rng: random.Random) -> Profile:
        """What profiling would have found: nothing to hide a snapshot behind."""
        plain = [Iteration(self.iteration * self.noisy(rng)) for _ in range(PROFILED)]
        slow = [
            self.iteration * self.noisy(rng) * (1 + self.slowdown)
            for _ in range(math.ceil(self.storage / self.iteration))
        ]
        stall = self.stall or SHORTEST
        slowed = [Iteration(seconds, 0.0, False, True) for seconds in slow]
        found = profiled([*plain, *slowed, Iteration(stall + self.iteration, stall, True)], [self.storage])
        assert found is not None
        return replace(found, iteration=self.iteration, stall=self.stall, duration=self.stall + self.storage)

    def noisy(self, rng: random.Random) -> float:
        return max(0.05, 1 + self.noise * rng.gauss(0, 1)) if self.noise else 1.0


@dataclass
class Run:
    """What came of a job: of each iteration what it takes alone and what it took; and the decisions."""

    alone: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def overhead(self, first: int, last: int | None = None) -> float:
        """By which part the iterations from one to another took longer than by themselves."""
        return sum(self.taken[first:last]) / sum(self.alone[first:last]) - 1

    @property
    def changes(self) -> list[Decision]:
        """The decisions that changed something, but the first."""
        return [each for each in self.decisions[1:] if each.changed]


def simulate(job: Job, policy: Terms | Intervals, iterations: int, seed: int = 0) -> Run:
    """Run a job under a policy that adapts, or under given intervals, with one persist at a time."""
    rng, run = random.Random(seed), Run()
    windows: list[list[Iteration]] = [[] for _ in range(job.ranks)]
    left = took = 0.0  # of the persist under way
    overruns, owed, durations = 0, False, list[float]()
    if isinstance(policy, Terms):
        state, decision = started(job.profile(rng), policy, 0)
        run.decisions.append(decision)
        intervals = decision.intervals
    else:
        intervals = policy

    def let_pass(seconds: float) -> float:
        """Let time pass; the part of it in which a persist was under way."""
        nonlocal left, took
        part = min(seconds, left * factor)
        took, left = took + part, left - part / factor if part < left * factor else 0.0
        if part and not left:
            durations.append(took)
        return part

    for step in range(1, iterations + 1):
        begins, ends = job.competes
        factor, slowdown = 1.0, job.slowdown
        if begins <= step < ends:
            factor, slowdown = job.slower, job.slowdown + job.more_slowdown
        snapshot = intervals.snapshots(step)
        stall = job.stall * job.noisy(rng) if snapshot else 0.0
        if snapshot and (owed or intervals.persists(step)):  # one that was put off begins with a later snapshot
            overruns += left > 0 and not owed
            owed = left > 0
            if not owed:
                left, took = max(job.storage, 1e-9), 0.0
        persisting = left > 0
        let_pass(stall)
        alone = job.iteration * job.noisy(rng)
        slowed = alone + let_pass(alone * (1 + slowdown)) * slowdown / (1 + slowdown)
        run.alone.append(alone)
        run.taken.append(slowed + stall)
        for window in windows:
            seen = slowed * (1 + 0.001 * rng.gauss(0, 1)) if job.ranks > 1 else slowed
            window.append(Iteration(seen + stall, stall, snapshot, persisting, alone))
        if isinstance(policy, Terms) and step == state.ends:
            ranks = [measured(window, durations, overruns) for window in windows]
            rng.shuffle(ranks)
            state, decision = tuned(state, ranks)
            run.decisions.append(decision)
        if run.decisions and step == run.decisions[-1].step:
            intervals, windows = decision.intervals, [[] for _ in windows]
            overruns, durations = 0, []
    return run


JOB = Job(noise=0.02, stall=0.3, storage=12.0, slowdown=0.01)


def some_job(rng: random.Random, noise: float = 0.0) -> Job:
    """Any job, with so much noise."""
    iteration = 10 ** rng.uniform(-2, 1)
    return Job(
        iteration=iteration,
        noise=noise,
        stall=iteration * 10 ** rng.uniform(-3, 0.5),
        storage=iteration * 10 ** rng.uniform(-1, 1.7),
        slowdown=rng.choice([0, 0, 0.01, 0.05, 0.2]),
        ranks=rng.choice([1, 1, 3]) if noise else 1,
    )


def best(job: Job, overhead: float) -> Intervals:
    """What somebody would choose who knew the costs."""
    duration = job.stall + job.storage
    slowed = math.ceil(duration / job.iteration) * job.slowdown * job.iteration
    return fit(Costs(job.iteration, job.stall, slowed, duration), overhead)


def test_without_noise_every_job_keeps_to_its_overhead_and_wastes_little():
    rng = random.Random(1)
    for _ in range(5):
        job, overhead = some_job(rng), rng.choice([0.01, 0.035, 0.05, 0.1])
        run = simulate(job, Terms(overhead), 3000)
        assert run.overhead(0) <= overhead * 1.001, job
        found, wanted = run.decisions[-1].intervals, best(job, 0.8 * overhead)
        assert found.memory + found.storage <= 1.5 * (wanted.memory + wanted.storage) + 2, job
        assert all(each.step <= 2500 for each in run.changes), job


def test_with_noise_jobs_keep_to_their_overhead_and_settle():
    """Noise is up to twice what is allowed, and hides some of it."""
    rng = random.Random(2)
    for seed in range(6):
        job, overhead = some_job(rng, 0.02), rng.choice([0.01, 0.035, 0.05, 0.1])
        run = simulate(job, Terms(overhead), 1600, seed)
        assert run.overhead(0, 200) <= overhead and run.overhead(800) <= overhead, job
        assert all(each.step <= 800 for each in run.changes), job


def test_a_competing_job_breaks_the_bound_of_static_intervals_and_not_of_adaptive_ones():
    """The paper's Table 5: from iteration 100 on another job competes for storage; 35% static, 5% adaptive."""
    competing = replace(JOB, noise=0.01, slowdown=0.0, competes=(100, FOREVER), slower=1.75, more_slowdown=0.35)
    run = simulate(competing, Terms(0.05), 3000)
    first = run.decisions[0].intervals
    static = simulate(competing, Intervals(first.memory, first.storage), 3000)
    assert run.overhead(0, 100) <= 0.05 and static.overhead(0, 100) <= 0.05
    assert static.overhead(100) >= 0.30
    assert run.overhead(300) <= 0.05
    assert run.overhead(100) <= 0.055


def test_the_frequency_comes_back_when_the_competitor_has_left():
    job = replace(JOB, competes=(500, 2000), slower=3.0, more_slowdown=0.05)
    run = simulate(job, Terms(0.05), 6000)
    before, during, after = (interval_at(run, step) for step in (499, 1999, 6000))
    assert during.storage >= 2 * before.storage
    assert after.storage <= 1.3 * before.storage and after.memory <= 1.5 * before.memory
    assert run.overhead(0, 500) <= 0.05 and run.overhead(800, 2000) <= 0.05 and run.overhead(4000) <= 0.05


def interval_at(run: Run, step: int) -> Intervals:
    return next(each.intervals for each in reversed(run.decisions) if each.step < step)
