"""`fastckpt chaos`: kills in a running job, and the recovery after each."""

import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fastckpt._core.config import Settings
from fastckpt_run.chaos.kill_outcome import KINDS, ChaosSummary, KillOutcome
from fastckpt_run.cli.output import FINDING, CommandOutput, answering, plain
from fastckpt_run.plan.quantities import positive_seconds

if TYPE_CHECKING:
    from fastckpt._core.format.ids import SaveId

_SIGNALS = {number.name.removeprefix("SIG"): number for number in signal.Signals}
_HARMLESS = (signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH)


def _signal(text: str) -> int:
    """The number of a signal, given as KILL, SIGKILL or 9; raises click.BadParameter."""
    name = text.upper().removeprefix("SIG")
    numbers = {str(int(number)): number for number in _SIGNALS.values()}
    found = _SIGNALS.get(name) or numbers.get(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no signal; give a name or a number, such as KILL, SEGV or 11")
    if found in _HARMLESS:
        raise click.BadParameter(f"{text!r} ends no process; give one that does, such as KILL, SEGV or 11")
    return int(found)


@click.command()
@click.argument("directory", metavar="DIR")
@click.option("--kill", "kind", type=click.Choice(KINDS), required=True, help="What to kill.")
@click.option("--every", type=positive_seconds, metavar="TIME", default="2m", help="Time between kills (2m).")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Kills, at most.")
@click.option(
    "--for", "duration", type=positive_seconds, metavar="TIME", help="Last kill before this time, such as 30m."
)
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of the choice of ranks (0).")
@click.option("--signal", "number", type=_signal, default="KILL", metavar="NAME", help="The signal (KILL).")
@click.option(
    "--limit", type=positive_seconds, metavar="TIME", default="10m", help="Limit for the job to come back (10m)."
)
@answering
def chaos(directory: str, **options: Any) -> CommandOutput:
    """Kill workers or agents of your running job: what comes back?

    --kill takes rank (one worker, chosen by --seed), agent (with its workers) or node (both at once, as a lost host).
    Something else must start a killed agent again. Only this user's processes on this host that have signed the
    job's memory are killed. It ends with the job, or by Ctrl-C.

    After each kill it reports the time to the next step, the resumed checkpoint and its tier, and if its bytes are
    those that were saved. docs/operate/chaos.md has an example.

    Exit code: 0 if all came back; 1 if something did not, or the job failed; 2 if no such job runs here.
    """
    from fastckpt_run.chaos.chaos_run import ChaosRun, KillPlan
    from fastckpt_run.chaos.running_job import find_job
    from fastckpt_run.views import chaos_text

    # For people the lines are the answer; with --json they are a comment.
    is_json = bool(click.get_current_context().params.get("as_json"))

    def tell(text: str) -> None:
        click.echo(plain(text), err=is_json)

    plan = KillPlan(**options)
    job = find_job(directory, Settings.from_environment().arenas)
    run = ChaosRun(job, plan, lambda kill: tell(chaos_text.line(kill)))
    agents = ", ".join(str(agent.process.pid) for agent in job.agents)
    workers = sum(len(agent.workers) for agent in job.agents)
    tell(f"the job with {job.location}: agent {agents}, {workers} workers on this host")
    warnings = run.warnings()
    for warning in warnings:
        click.echo(f"fastckpt: warning: {plain(warning)}", err=True)
    summary = run.run()
    document = {
        "directory": job.location,
        "warnings": warnings,
        "kills": [_to_json(kill) for kill in summary.kills],
        **_summary(summary),
    }
    return CommandOutput(document, lambda screen: chaos_text.show(screen, summary), FINDING if summary.faults else 0)


def _summary(summary: ChaosSummary) -> dict[str, Any]:
    return {
        "came_back": sum(kill.came_back for kill in summary.kills),
        "tiers": dict(summary.tiers),
        "ended": summary.ended,
        "job": summary.job or None,
        "seconds": summary.seconds,
        "faults": summary.faults,
    }


def _to_json(kill: KillOutcome) -> dict[str, Any]:
    saves = {"held": _save(kill.held), "resumed": _save(kill.resumed)}
    return {**asdict(kill), **saves, "came_back": kill.came_back, "fault": kill.fault}


def _save(save: "SaveId | None") -> dict[str, Any] | None:
    return {"step": save.step, "history": save.history if save.history >= 0 else None} if save else None
