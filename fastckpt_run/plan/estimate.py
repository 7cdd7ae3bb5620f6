"""Joins the facts about a job to an estimate: sizes, measured costs, the policy of the frequency, failures."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from fastckpt._core.inspect.checkpoint_sizes import CheckpointSizes
from fastckpt._core.inspect.saved_profile import SavedProfile
from fastckpt._core.policy.expected_goodput import ExpectedGoodput, expected_goodput
from fastckpt._core.policy.failure_interval import FailureInterval, failure_interval
from fastckpt._core.policy.frequency.failures import mean_time_between
from fastckpt._core.policy.frequency.intervals import Costs, Intervals
from fastckpt._core.policy.frequency.profiling import Profile
from fastckpt._core.policy.frequency.requested import AUTO, RequestedIntervals
from fastckpt._core.policy.frequency.tuning import Terms, started
from fastckpt._core.policy.memory_reserve import slots_that_fit
from fastckpt._core.policy.resource_plan import JobShape, MemoryLimits, NodeImages, limits, per_node, reshaped
from fastckpt._core.policy.size_growth import SizeGrowth, size_growth
from fastckpt._core.report.measured_costs import MeasuredCosts
from fastckpt.errors import ConfigError

STEPS, SAVES = 8, 3
"""Steps and saves below which logs are no measurement of their costs."""


@dataclass(frozen=True)
class Figure:
    """A number and where it is from; None if it is not known, and then the option that gives it."""

    value: float | None
    source: str

    @property
    def known(self) -> bool:
        """Return whether there is a number."""
        return self.value is not None


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan: seconds, bytes, and None for a value that is to be found out.

    Attributes:
        nodes: Nodes of the job.
        ranks_per_node: Ranks on each.
        world_size: Ranks of the job.
        slots: Slots that an arena is to have, at most.
        memory: Bytes of the tmpfs that is planned for.
        processes: Bytes that the processes of a node take for themselves.
        mtbf: Seconds between failures.
        step: Seconds of a step.
        snapshot: Seconds that a save to memory stalls.
        restart: Seconds of a restart.
        persist_rate: Bytes per second that storage takes from a node.
        overhead: The part of training time that saves may cost.
        every: Intervals that the user requests.
    """

    nodes: int | None = None
    ranks_per_node: int | None = None
    world_size: int | None = None
    slots: int = 3
    memory: int | None = None
    processes: int | None = None
    mtbf: float | None = None
    step: float | None = None
    snapshot: float | None = None
    restart: float | None = None
    persist_rate: float | None = None
    overhead: float = 0.035
    every: RequestedIntervals = AUTO


@dataclass(frozen=True)
class Observed:
    """Observations other than the sizes: from logs, the checkpoint and the disk; None for those that are missing.

    Attributes:
        costs: From event logs.
        nodes: Nodes in these logs.
        profile: From the checkpoint.
        write_rate: Bytes per second that the directory takes now.
        processes: Bytes of a node's processes.
        sizes_by_step: Bytes of the job's checkpoints.
        is_trial: True if the logs are of a trial, which is too short to show how often a job fails.
        free, total: Bytes of the tmpfs that arenas may take, of how many.
    """

    costs: MeasuredCosts | None = None
    nodes: int | None = None
    profile: SavedProfile | None = None
    write_rate: float | None = None
    processes: int | None = None
    sizes_by_step: Mapping[int, int] = field(default_factory=dict)
    free: int = 0
    total: int = 0
    is_trial: bool = False


@dataclass(frozen=True)
class GrowthPlan:
    """Growth of the checkpoints, and the last steps at which memory holds three slots, and two; None for no end."""

    growth: SizeGrowth
    three: int | None
    two: int | None


@dataclass(frozen=True)
class ResourceEstimate:
    """Resources that the checkpoints of a job need.

    Attributes:
        shape: Nodes and ranks.
        shape_source: Origin of these.
        total: Bytes of a save, on all nodes once.
        node: Of the node with the most.
        slots: That an arena is planned with.
        limits: Of a node's tmpfs.
        cgroup: Bytes of memory that the container of a node needs.
        processes: Of which these are of its processes.
        fit: Slots that the tmpfs planned for holds; 0: none.
        capacity: Bytes of that tmpfs that are free, and all.
        rate: Bytes per second to storage, from a node.
        persist, step, snapshot, restart: Seconds.
        intervals: Between saves; None if costs are not known.
        intervals_source: Origin of the intervals.
        failures: Failures that were observed.
        mtbf: Seconds between failures, as goodput is computed with.
        goodput: None if something is not known.
        growth: None for fewer than two checkpoints.
    """

    shape: JobShape
    shape_source: str
    total: int
    node: NodeImages
    slots: int
    limits: MemoryLimits
    cgroup: int | None
    processes: Figure
    fit: int
    capacity: tuple[int, int]
    rate: Figure
    persist: Figure
    step: Figure
    snapshot: Figure
    restart: Figure
    intervals: Intervals | None
    intervals_source: str
    failures: FailureInterval | None
    mtbf: Figure
    goodput: ExpectedGoodput | None
    growth: GrowthPlan | None


def estimate(sizes: CheckpointSizes, seen: Observed, options: PlanOptions) -> ResourceEstimate:
    """The estimate; raises ConfigError for a shape that cannot be."""
    # 1. the shape of the job   2. memory of a node   3. costs of steps, saves and persists   4. intervals by the
    # policy   5. failures, and goodput   6. growth
    shape, shape_source = _shape(sizes, seen, options)
    files = reshaped(sizes.files, sizes.world or 1, shape)
    nodes = per_node(files, shape)
    node = max(nodes, key=lambda each: each.slot)
    memory = limits(node, shape, options.slots)
    processes = _first(
        (options.processes, "--process-memory"), (seen.processes, "the agent and workers of the trial"),
        unknown="--process-memory",
    )  # fmt: skip
    free, total = (options.memory, options.memory) if options.memory else (seen.free, seen.total)
    same = shape.ranks == (sizes.world or 1)
    step, snapshot, restart = _costs(seen, options, same=same)
    rate, persist = _persist(node, sizes, seen, options)
    mtbf, failures = _failures(None if seen.is_trial else seen.costs, options)
    intervals, intervals_source, costs = _intervals(step, snapshot, persist, seen, options, failures, may_follow=same)
    goodput = None
    if costs and intervals and restart.value is not None and mtbf.value is not None:
        goodput = expected_goodput(costs, intervals, restart.value, mtbf.value)
    return ResourceEstimate(
        shape=shape,
        shape_source=shape_source,
        total=sum(file.size for file in files),
        node=node,
        slots=options.slots,
        limits=memory,
        cgroup=None if processes.value is None else memory.cgroup(round(processes.value)),
        processes=processes,
        fit=slots_that_fit(node.images, free, total, options.slots),
        capacity=(free, total),
        rate=rate,
        persist=persist,
        step=step,
        snapshot=snapshot,
        restart=restart,
        intervals=intervals,
        intervals_source=intervals_source,
        failures=failures,
        mtbf=mtbf,
        goodput=goodput,
        growth=_growth(sizes, node, seen, (free, total), options.slots),
    )


def _shape(sizes: CheckpointSizes, seen: Observed, options: PlanOptions) -> tuple[JobShape, str]:
    ranks = options.world_size or (options.nodes or 0) * (options.ranks_per_node or 0) or None
    source = (
        "as the options say"
        if ranks
        else ("as it was tried" if seen.is_trial else "as it was saved")
        if sizes.world
        else "assumed"
    )
    nodes = options.nodes or sizes.nodes
    if ranks is None:
        ranks = sizes.world or 1
        # Of nodes that came and went, the logs do not show how many saved this.
        nodes = nodes or (seen.nodes if seen.nodes and ranks % seen.nodes == 0 else None)
        if not (nodes or options.ranks_per_node):
            source += ", on one node, which is assumed: --nodes or --ranks-per-node" * (sizes.world not in (1, None))
    each = options.ranks_per_node or -(-ranks // (nodes or 1))
    nodes = nodes or -(-ranks // each)
    if nodes * each != ranks:
        raise ConfigError(
            f"{ranks} ranks on {nodes} nodes with {each} each do not go together; give --nodes, --ranks-per-node and "
            f"--world-size so that the last is the product of the others"
        )
    return JobShape(nodes, each), source


def _first(*figures: tuple[float | None, str], unknown: str) -> Figure:
    """The first number that is known."""
    return next(
        (Figure(value, source) for value, source in figures if value is not None), Figure(None, f"give {unknown}")
    )


def _costs(seen: Observed, options: PlanOptions, *, same: bool) -> tuple[Figure, Figure, Figure]:
    """Seconds of a step, a snapshot and a restart: as given, or measured by logs, or else by the checkpoint's job."""
    logs, profile = seen.costs, seen.profile.profile if seen.profile else None
    other = "" if same else ", of the job that saved it"
    steps, saves = [(options.step, "--step-seconds")], [(options.snapshot, "--snapshot-seconds")]
    restarts = [(options.restart, "--restart-seconds")]
    if logs and logs.steps >= STEPS and logs.saves >= SAVES:
        steps.append((logs.step, f"{logs.steps:,} steps in the event logs{other}"))
        saves.append((logs.snapshot, f"{logs.saves:,} saves in the event logs{other}"))
    if profile:
        own = f"the job's own profile, in the checkpoint{other}"
        steps.append((profile.iteration, own))
        saves.append((profile.stall + profile.copy_slowdown, own))
    if logs:
        restarts.append((logs.restart, f"median of {logs.restarts:,} in the event logs"))
        restarts.append((logs.start, "the first start in the event logs: no restart was seen"))
    return (
        _first(*steps, unknown="--step-seconds"),
        _first(*saves, unknown="--snapshot-seconds"),
        _first(*restarts, unknown="--restart-seconds"),
    )


def _persist(node: NodeImages, sizes: CheckpointSizes, seen: Observed, options: PlanOptions) -> tuple[Figure, Figure]:
    """The rate of storage, and the seconds of a persist; nodes write at the same time."""
    logs, profile = seen.costs, seen.profile.profile if seen.profile else None
    persists = logs.persists if logs else ()
    if options.persist_rate is None and persists and seen.nodes:
        # A persist has costs besides the bytes: the measured time is scaled, not divided by a rate.
        seconds = median(seconds for _, seconds in persists)
        of_node = median(size for size, _ in persists) / seen.nodes
        source = f"median of {len(persists)} persists in the event logs"
        return Figure(of_node / seconds, source), Figure(seconds * node.images / of_node, source)
    rate = _first(
        (options.persist_rate, "--persist-mbps"),
        (seen.write_rate, "written to the directory now"),
        unknown="--persist-mbps",
    )
    if rate.value is not None:
        return rate, Figure(node.images / rate.value, f"bytes of a node at {rate.source}")
    if profile and profile.duration:
        return rate, Figure(profile.duration * node.images / sizes.total, "as the job's own profile has it")
    return rate, Figure(None, rate.source)


def _failures(logs: MeasuredCosts | None, options: PlanOptions) -> tuple[Figure, FailureInterval | None]:
    seen = failure_interval(logs.failures, logs.observed) if logs else None
    figures = [(options.mtbf, "--mtbf")]
    if seen:
        figures.append((seen.mean, f"{seen.failures:,} in the event logs"))
        figures.append((seen.least, "no failure in the event logs: it is at least that, with 90 % confidence"))
    return _first(*figures, unknown="--mtbf"), seen


def _intervals(
    step: Figure,
    snapshot: Figure,
    persist: Figure,
    seen: Observed,
    options: PlanOptions,
    failures: FailureInterval | None,
    *,
    may_follow: bool,
) -> tuple[Intervals | None, str, Costs | None]:
    """The intervals, their source, and the costs for which they are."""
    if step.value is None or snapshot.value is None or persist.value is None:
        return None, "unknown: they follow from seconds of a step, a snapshot and a persist", None
    saved = seen.profile.profile if seen.profile else None
    # The steps of logs are as persists have slowed them down; those of a profile are without.
    is_alone = saved is not None and step.value == saved.iteration
    slowdown = saved.slowdown if saved is not None and is_alone else 0.0
    duration = snapshot.value + persist.value
    profile = Profile(step.value, snapshot.value, duration, slowdown)
    mtbf = options.mtbf or (mean_time_between(failures.failures, failures.seconds) if failures else None)
    _, decision = started(profile, Terms(options.overhead, options.every, mtbf))
    chosen, source = replace(decision.intervals, anchor=0), "chosen by the policy of Checkpointer(every='auto')"
    if options.every != AUTO:
        source = "--every, and the policy for the rest"
    elif may_follow and seen.costs and (last := seen.costs.decided) and last.memory and last.storage:
        chosen, source = Intervals(last.memory, last.storage), "as the job itself chose last"
    elif may_follow and seen.profile and seen.profile.intervals and seen.profile.overhead == options.overhead:
        chosen, source = seen.profile.intervals, "as the job itself had chosen by then"
    during = slowdown * -(-duration // step.value)
    return chosen, source, Costs(step.value, snapshot.value, during, duration)


def _growth(
    sizes: CheckpointSizes, node: NodeImages, seen: Observed, capacity: tuple[int, int], slots: int
) -> GrowthPlan | None:
    found = size_growth(seen.sizes_by_step)
    if found is None:
        return None
    share = node.images / sizes.total  # the largest node's part of a save
    ends = [found.reaches(int(_largest(capacity, count) / share)) for count in (slots, 2)]
    return GrowthPlan(found, *ends)


def _largest(capacity: tuple[int, int], slots: int) -> int:
    """Bytes of the largest images of which so many slots fit, by bisection."""
    free, total = capacity
    low, high = 0, max(1, free)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if slots_that_fit(middle, free, total, slots) == slots else (low, middle)
    return low
