"""The text of a resource estimate that people read: a table of numbers with their sources, and lines to paste."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastckpt._core.byte_sizes import binary, decimal
from fastckpt._core.inspect.checkpoint_sizes import CheckpointSizes
from fastckpt._core.policy.failure_interval import FailureInterval
from fastckpt._core.policy.memory_reserve import RESERVE
from fastckpt._core.policy.resource_plan import round_mebibytes
from fastckpt_run.cli.output import Screen
from fastckpt_run.formatting import count, duration
from fastckpt_run.plan.estimate import Figure, GrowthPlan, Observed, ResourceEstimate

if TYPE_CHECKING:
    from fastckpt_run.plan.script_trial import ScriptTrial

Row = list[str]


def show(
    screen: Screen,
    name: str,
    sizes: CheckpointSizes,
    seen: Observed,
    found: ResourceEstimate,
    trial: "ScriptTrial | None" = None,
) -> None:
    """Print an estimate."""
    shape = found.shape
    screen.line(
        f"{name}: {count(shape.ranks, 'rank')} on {count(shape.nodes, 'node')}, {found.shape_source}"
        + (f"; it is assumed to have {sizes.assumed}" if sizes.assumed else "")
    )
    rows = [*_memory(found, trial), *_time(found, seen), *_failures(found), *_growth(found.growth)]
    screen.table(["WHAT", ">VALUE", "FROM"], rows)
    if not found.fit:
        screen.line(f"it does not fit: two slots of {binary(found.node.images)} and what is left to others")
    elif found.fit < found.slots:
        screen.line("two slots alone fit: a save that comes while one is persisted takes the place of an older one")
    screen.line("to paste, for a container of one node:")
    for line in _paste(found):
        screen.line(f"  {line}")
    for what, remedy in unknown(found):
        screen.line(f"unknown: {what}; {remedy}")
    if trial is not None:
        _show_trial(screen, trial)


def unknown(found: ResourceEstimate) -> list[tuple[str, str]]:
    """Return the figures that the estimate lacks, each with the option that would give it."""
    figures = {
        "seconds of a step": found.step,
        "seconds that a save stalls": found.snapshot,
        "seconds of a persist": found.persist,
        "seconds of a restart": found.restart,
        "the time between failures": found.mtbf,
        "memory of the processes, and so of the container": found.processes,
    }
    return [(what, figure.source) for what, figure in figures.items() if not figure.known]


def _memory(found: ResourceEstimate, trial: "ScriptTrial | None") -> Iterator[Row]:
    node, limits = found.node, found.limits
    yield ["a save", decimal(found.total), "all files, once"]
    yield ["a save on a node", decimal(node.images), count(node.files, "file")]
    copies = f" + copies {binary(node.copies)}" if node.copies else ""
    yield ["arena of a node", binary(limits.arena), f"{found.slots} slots of {binary(node.slot)}{copies}"]
    if trial is not None:
        ranks = count(trial.sizes.world or 1, "rank")
        yield [
            "arena of the trial",
            binary(trial.arena),
            f"as measured with {ranks}; {count(trial.slots, 'slot')} held a save",
        ]
    yield ["tmpfs of a node", binary(limits.tmpfs), f"the arena, and {binary(RESERVE)} left to data loaders"]
    free, total = found.capacity
    yield ["planned for", binary(total), f"{binary(free)} free; {count(found.fit, 'slot')} fit"]
    if found.cgroup is not None:
        own = found.processes
        yield ["memory of a node", binary(found.cgroup), f"with {binary(round(own.value or 0))} of {own.source}"]


def _time(found: ResourceEstimate, seen: Observed) -> Iterator[Row]:
    yield ["persist", _seconds(found.persist), found.persist.source]
    if found.rate.value is not None:
        yield ["rate of storage", f"{decimal(round(found.rate.value))}/s", found.rate.source]
    if seen.write_rate is not None and found.rate.value != seen.write_rate:
        yield ["", f"{decimal(round(seen.write_rate))}/s", "written to the directory now"]
    yield ["step", _seconds(found.step), found.step.source]
    yield ["snapshot", _seconds(found.snapshot), found.snapshot.source]
    yield ["restart", _seconds(found.restart), found.restart.source]
    chosen = found.intervals
    if chosen is None:
        yield ["intervals", "?", found.intervals_source]
        return
    yield ["snapshot every", count(chosen.memory, "step"), found.intervals_source]
    yield ["persist every", count(chosen.storage, "step"), ""]


def _failures(found: ResourceEstimate) -> Iterator[Row]:
    yield ["between failures", _seconds(found.mtbf), found.mtbf.source]
    if found.failures is not None:
        yield ["as observed", _interval(found.failures), _observation(found.failures)]
    if found.goodput is not None:
        good, least = (
            found.goodput,
            ", or more" * (found.failures is not None and found.mtbf.value == found.failures.least),
        )
        yield ["goodput", _percent(good.memory), f"where failures leave memory as it is (a worker dies){least}"]
        yield ["", _percent(good.storage), f"where they take memory along (a node is lost){least}"]
        yield ["", _percent(good.without), "without failures"]


def _interval(seen: FailureInterval) -> str:
    least = duration(round(seen.least * 1e9))
    return f"{least} or more" if seen.most is None else f"{least} to {duration(round(seen.most * 1e9))}"


def _observation(seen: FailureInterval) -> str:
    sides = "one-sided" if seen.most is None else "two-sided"
    return f"{count(seen.failures, 'failure')} in {duration(round(seen.seconds * 1e9))}: 90 %, {sides}, exact Poisson"


def _growth(plan: GrowthPlan | None) -> Iterator[Row]:
    if plan is None:
        return
    growth = plan.growth
    source = f"{growth.method} of {count(growth.points, 'checkpoint')}"
    if growth.per_step <= 0:
        yield ["growth", "none", source]
        return
    yield ["growth", f"{decimal(round(growth.per_step))} a step", source]
    if plan.three != plan.two:
        yield ["a third slot until", f"step {plan.three:,}", "then it is given up"]
    yield ["memory ends at", f"step {plan.two:,}", "later saves are skipped"]


def _paste(found: ResourceEstimate) -> Iterator[str]:
    limits = found.limits
    memory = None if found.cgroup is None else round_mebibytes(found.cgroup)
    yield f"docker run {limits.docker}" + ("" if memory is None else f" --memory={memory}m")
    yield f"volumes: [{{name: shm, {limits.kubernetes}}}]"
    yield "volumeMounts: [{name: shm, mountPath: /dev/shm}]"
    if memory is not None:
        yield f"resources: {{limits: {{memory: {memory}Mi}}}}"


def _show_trial(screen: Screen, trial: "ScriptTrial") -> None:
    if trial.left.why:
        screen.line(f"the trial has removed nothing in {trial.directory}: {trial.left.why}")
    else:
        screen.line(f"the trial has removed all that it stored in {trial.directory}")
    if trial.left.names:
        screen.line(f"the script itself has left there: {', '.join(trial.left.names)}")
    if trial.others:
        screen.line(f"it also saves in {', '.join(trial.others)}, which this plan leaves out")


def _seconds(figure: Figure) -> str:
    return "?" if figure.value is None else duration(round(figure.value * 1e9))


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"
