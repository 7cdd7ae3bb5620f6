"""`fastckpt plan`: the memory, storage and time that the checkpoints of a job need."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastckpt._core.config import Settings
from fastckpt._core.policy.frequency.requested import AUTO, RequestedIntervals
from fastckpt._core.storage.store import is_url
from fastckpt.errors import ConfigError
from fastckpt_run.cli.output import CommandOutput, answering, describe, plain
from fastckpt_run.plan.quantities import (
    bytes_per_second,
    intervals,
    positive_bytes,
    positive_seconds,
    seconds_or_none,
)

if TYPE_CHECKING:
    from fastckpt._core.inspect.checkpoint_sizes import CheckpointSizes
    from fastckpt_run.plan.estimate import Figure, Observed, PlanOptions, ResourceEstimate
    from fastckpt_run.plan.script_trial import ScriptTrial

SCRIPT = ".py"
COUNT = click.IntRange(min=1)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_OPTIONS: list[Decorator] = [
    click.option("--nodes", type=COUNT, metavar="N", help="Nodes of the job."),
    click.option("--ranks-per-node", type=COUNT, metavar="N", help="Ranks on each node."),
    click.option("--world-size", type=COUNT, metavar="N", help="Ranks of the job (default: as saved)."),
    click.option("--slots", type=click.IntRange(2, 3), help="Slots of an arena (default: as --fast-slots)."),
    click.option("--memory", type=positive_bytes, metavar="BYTES", help="Size of the tmpfs (default: this host's)."),
    click.option(
        "--process-memory",
        "processes",
        type=positive_bytes,
        metavar="BYTES",
        help="Memory of a node's processes.",
    ),
    click.option(
        "--mtbf", type=positive_seconds, metavar="TIME", help="Mean time between failures of the job, such as 4h."
    ),
    click.option(
        "--step-seconds", "step", type=positive_seconds, metavar="TIME", help="Duration of a step without saves."
    ),
    click.option(
        "--snapshot-seconds",
        "snapshot",
        type=seconds_or_none,
        metavar="TIME",
        help="Stall of training by a save to memory.",
    ),
    click.option(
        "--restart-seconds",
        "restart",
        type=seconds_or_none,
        metavar="TIME",
        help="Time from a failure to the next step.",
    ),
    click.option(
        "--persist-mbps",
        "persist_rate",
        type=bytes_per_second,
        metavar="MB/S",
        help="Rate of storage for a node.",
    ),
    click.option("--overhead", type=float, default=0.035, help="Share of time for saves (0.035)."),
    click.option(
        "--every", type=intervals, metavar="M[,S]", help="Steps between saves to memory, storage (default: chosen)."
    ),
    click.option(
        "--timeout",
        type=positive_seconds,
        metavar="TIME",
        default="600s",
        help="Limit for the first save of a SCRIPT (600s).",
    ),
]


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


class _PlanCommand(click.Command):
    """A command with options before a script, which has its own after it; with a checkpoint they may be anywhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line."""
        ctx.allow_interspersed_args = not any(argument.endswith(SCRIPT) for argument in args)
        return super().parse_args(ctx, args)


@click.command(cls=_PlanCommand)
@_with_options
@click.argument("what", metavar="DIR[@STEP] | SCRIPT [ARG]...", nargs=-1, required=True, type=click.UNPROCESSED)
@answering
def plan(what: tuple[str, ...], timeout: float, slots: int | None, **given: Any) -> CommandOutput:
    """Estimate memory, persists, intervals and goodput of a job.

    DIR[@STEP] may also be a file of torch.save, or a directory of DCP. Event logs and checkpoints of DIR give measured
    values. Without --persist-mbps, up to 256 MiB are written to DIR and removed.

    SCRIPT ends with .py, after the options. It runs with --ranks-per-node workers until its first saves are in memory.
    Its checkpoint directory must be empty or new, and stays so.
    """
    # Imported here: `fastckpt --help` and the other commands must not wait for it.
    from fastckpt._core.policy.frequency.intervals import checked_overhead
    from fastckpt_run.plan.estimate import PlanOptions, estimate
    from fastckpt_run.views import plan_text

    settings = Settings.from_environment()
    checked_overhead(given["overhead"])
    every: RequestedIntervals = given.pop("every") or AUTO
    options = PlanOptions(slots=slots or settings.slots, every=every, **given)
    trial = _trial(what, options, settings, timeout) if what[0].endswith(SCRIPT) else None
    if trial is None and len(what) > 1:
        raise ConfigError(
            f"{what[1]} follows {what[0]}, which is no script that ends with {SCRIPT}; give one checkpoint"
        )
    sizes, seen = (
        _of_trial(trial, settings) if trial else _of_checkpoint(what[0], settings, writes=options.persist_rate is None)
    )
    found = estimate(sizes, seen, options)
    name = what[0]
    document = _document(name, sizes, seen, found, trial)
    return CommandOutput(document, lambda screen: plan_text.show(screen, name, sizes, seen, found, trial))


def _trial(what: tuple[str, ...], options: "PlanOptions", settings: Settings, timeout: float) -> "ScriptTrial":
    from fastckpt_run.plan.script_trial import try_script

    if not Path(what[0]).is_file():
        raise ConfigError(f"there is no script {what[0]}")
    ranks = options.ranks_per_node or options.world_size or 1
    return try_script(
        what, ranks, settings.arenas, timeout, lambda line: click.echo(f"fastckpt: {plain(line)}", err=True)
    )


def _of_trial(trial: "ScriptTrial", settings: Settings) -> "tuple[CheckpointSizes, Observed]":
    from fastckpt._core.report.measured_costs import measured_costs
    from fastckpt_run.plan.estimate import Observed

    costs = measured_costs(trial.report)
    free, total = _memory(settings)
    return trial.sizes, Observed(costs, 1, processes=trial.processes, free=free, total=total, is_trial=True)


def _of_checkpoint(text: str, settings: Settings, *, writes: bool) -> "tuple[CheckpointSizes, Observed]":
    from fastckpt._core.inspect.checkpoint_sizes import checkpoint_sizes, sizes_by_step
    from fastckpt._core.inspect.inventory import take
    from fastckpt._core.inspect.saved_profile import saved_profile
    from fastckpt_run.plan.estimate import Observed

    sizes = checkpoint_sizes(text, settings.arenas)
    item = sizes.source.item
    if item is None:
        free, total = _memory(settings)
        place = Path(next(iter(sizes.source.files.values())).path).parent
        return sizes, Observed(write_rate=_write_rate(place, sizes.total, writes=writes), free=free, total=total)
    inventory = take(sizes.location, settings.arenas)
    # The memory of its own arena is there for it again.
    free, total = _memory(settings, sum(arena.size for arena in inventory.arenas))
    report = _report(inventory.location)
    costs, nodes = report or (None, None)
    return sizes, Observed(
        costs=costs,
        nodes=nodes,
        profile=saved_profile(sizes.source),
        write_rate=_write_rate(inventory.location, sizes.total, writes=writes),
        sizes_by_step=sizes_by_step(inventory, item),
        free=free,
        total=total,
    )


def _report(location: str) -> Any:
    """The costs in a directory's event logs, and the nodes; None if it has no logs."""
    from fastckpt._core.report.events import find, read
    from fastckpt._core.report.measured_costs import measured_costs
    from fastckpt._core.report.report import report

    try:
        found = report([read(path) for path in find(location)])
    except (ConfigError, OSError):
        return None
    return measured_costs(found), len(found.nodes) or None


def _write_rate(place: Path | str, size: int, *, writes: bool) -> float | None:
    """The rate of a directory; None if nothing can be written there, or is to be."""
    from fastckpt._core.io.write_rate import write_rate

    if not writes or is_url(str(place)):
        return None
    try:
        rate = write_rate(Path(place), size)
    except OSError:
        return None
    return min(rate, limit) if (limit := Settings.from_environment().persist_mbps * 1e6) else rate


def _memory(settings: Settings, present: int = 0) -> tuple[int, int]:
    """Bytes that are free for arenas on this host under its tightest limit, before anything is left to others."""
    from fastckpt._core.memory.headroom import unreserved

    found = unreserved(Path(settings.arenas))
    return found.free + present, found.total


def _document(
    name: str, sizes: "CheckpointSizes", seen: "Observed", found: "ResourceEstimate", trial: "ScriptTrial | None"
) -> dict[str, Any]:
    """A plan as JSON: bytes and seconds."""
    from fastckpt_run.views.plan_text import unknown

    item = sizes.source.item
    growth, limits = found.growth, found.limits
    return {
        "plan_of": name,
        "checkpoint": describe(item) if item and trial is None else None,
        "assumed": sizes.assumed or None,
        "nodes": found.shape.nodes,
        "ranks_per_node": found.shape.ranks_per_node,
        "ranks": found.shape.ranks,
        "shape_source": found.shape_source,
        "bytes": {"save": found.total, "node": found.node.images, "files": [asdict(file) for file in sizes.files]},
        "memory": {
            "slots": found.slots,
            "slot": found.node.slot,
            "arena": limits.arena,
            "tmpfs": limits.tmpfs,
            "cgroup": found.cgroup,
            "processes": found.processes.value,
            "slots_that_fit": found.fit,
            "free": found.capacity[0],
            "total": found.capacity[1],
            "docker": limits.docker,
            "kubernetes": limits.kubernetes,
        },
        "persist": _figure(found.persist) | {"rate": found.rate.value, "written_now": seen.write_rate},
        "step": _figure(found.step),
        "snapshot": _figure(found.snapshot),
        "restart": _figure(found.restart),
        "intervals": {
            "memory": found.intervals.memory if found.intervals else None,
            "storage": found.intervals.storage if found.intervals else None,
            "source": found.intervals_source,
        },
        "failures": asdict(found.failures) if found.failures else None,
        "mtbf": _figure(found.mtbf),
        "goodput": asdict(found.goodput) if found.goodput else None,
        "growth": asdict(growth.growth) | {"three_slots_until": growth.three, "two_slots_until": growth.two}
        if growth
        else None,
        "trial": {
            "directory": trial.directory,
            "arena": trial.arena,
            "slots": trial.slots,
            "others": trial.others,
            "left": asdict(trial.left),
        }
        if trial
        else None,
        "unknown": [{"what": what, "remedy": remedy} for what, remedy in unknown(found)],
    }


def _figure(figure: "Figure") -> dict[str, Any]:
    return {"seconds": figure.value, "source": figure.source}
