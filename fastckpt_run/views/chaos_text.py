"""Text of `fastckpt chaos`: a line for each kill, and a table of all."""

import statistics

from fastckpt_run.chaos.kill_outcome import AGENT, NODE, ChaosSummary, KillOutcome
from fastckpt_run.chaos.resumed_bytes import DIFFERENT, EQUAL
from fastckpt_run.cli.output import Screen
from fastckpt_run.formatting import count, duration

_BYTES = {EQUAL: "bytes equal", DIFFERENT: "bytes DIFFER"}


def line(kill: KillOutcome) -> str:
    """One kill and its recovery, in a line."""
    whom = {AGENT: "the agent", NODE: "the agent and its workers"}.get(kill.kind, f"rank {kill.rank}")
    pids = ", ".join(map(str, kill.pids))
    at = "before the first save" if kill.step is None else f"at step {kill.step}"
    said = f"kill {kill.number}: {whom} (pid {pids}) {at}: "
    if kill.stopped:
        return f"{said}not waited for"
    if kill.seconds is None:
        return f"{said}NOT BACK: {kill.fault}"
    back = f"a step {duration(round(kill.seconds * 1e9))} later, "
    back += "from the beginning" if kill.resumed is None else f"from step {kill.resumed.step}"
    if kill.tiers:
        back += f" in {' and '.join(kill.tiers)}"
    lost = "" if kill.lost is None else f", {count(kill.lost, 'step')} lost"
    compared = f", {_BYTES[kill.digests]}" if kill.digests in _BYTES else ", bytes not compared" if kill.resumed else ""
    left = "" if kill.restarts_left is None else f", {count(kill.restarts_left, 'restart')} left"
    return f"{said}{back}{lost}{compared}{left}{f'; FAULT: {kill.fault}' if kill.fault else ''}"


def show(screen: Screen, summary: ChaosSummary) -> None:
    """The summary, for people."""
    kills = [kill for kill in summary.kills if not kill.stopped]
    times = [kill.seconds for kill in kills if kill.seconds is not None]
    lost = [kill.lost for kill in kills if kill.lost is not None]
    rows = [["kills", str(len(summary.kills))], ["came back", str(sum(kill.came_back for kill in kills))]]
    if times:
        rows.append(["seconds to the next step", _spread(times, "{:.2f}")])
    if lost:
        rows.append(["steps lost", _spread(lost, "{:.0f}")])
    rows += [[f"resumed from {tier}", str(number)] for tier, number in sorted(summary.tiers.items())]
    rows.append(["bytes equal to what was saved", f"{sum(k.digests == EQUAL for k in kills)} of {len(kills)}"])
    screen.line(f"{summary.ended}{summary.job and f' ({summary.job})'}, after {duration(round(summary.seconds * 1e9))}")
    screen.table(["WHAT", ">NUMBER"], rows)
    for fault in summary.faults:
        screen.line(f"did not come back: {fault}")


def _spread(values: list[float] | list[int], form: str) -> str:
    parts = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return ", ".join(f"{name} {form.format(value)}" for name, value in parts.items())
