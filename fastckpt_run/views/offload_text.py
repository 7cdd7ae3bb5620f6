"""The text of a report on offloaded activations, in the terminal and on the page."""

from fastckpt._core.byte_sizes import binary, decimal
from fastckpt._core.report.offloaded_ranks import OffloadedRank
from fastckpt._core.report.report import Report
from fastckpt_run import formatting
from fastckpt_run.cli.output import Screen

SHOWN = 20
"""Ranks, and ends of offloading, that are shown at most."""
HEADS = ["RANK", ">STEPS", ">WRITTEN", ">PLANNED", ">WAIT", ">PREDICTED", ">KEPT", ">BUDGET", "DIRECTORY"]
"""Column heads of ranks that offload: bytes and times are of a step."""


def show(screen: Screen, found: Report) -> None:
    """Print a line for each rank that offloads."""
    if found.offloaded:
        screen.table(HEADS, [row(one) for one in shown(found)])
    if len(found.offloaded) > SHOWN:
        screen.line(f"the {SHOWN} ranks that wait longest, of {len(found.offloaded):,}; --json has all")


def shown(found: Report) -> list[OffloadedRank]:
    """The ranks that offload; of many, those that wait longest, by number."""
    longest = sorted(found.offloaded, key=lambda one: (-(one.step_wait or 0), one.rank))[:SHOWN]
    return sorted(longest, key=lambda one: one.rank)


def row(one: OffloadedRank) -> list[str]:
    """A line on a rank that offloads: the bytes and wait of one step, measured and planned, and the kept bytes."""
    return [
        str(one.rank),
        f"{one.steps:,}",
        *("-" if size is None else decimal(size) for size in (one.step_written, one.planned_written)),
        *("-" if time is None else formatting.duration(time) for time in (one.step_wait, one.predicted_wait)),
        *("-" if size is None else binary(size) for size in (one.kept, one.budget)),
        one.directory,
    ]


def facts(found: Report, start: int) -> list[str]:
    """Describe the effect of offloading on a step of the job, and its ends."""
    if not found.offloaded:
        return []
    measured = [one for one in found.offloaded if one.steps]
    ends = [(one.rank, end) for one in found.offloaded for end in one.ends]
    text = f"offloading: activations of {formatting.count(len(found.offloaded), 'rank')}"
    if measured:
        slowest = max(measured, key=lambda one: (one.step_wait or 0, -one.rank))
        written, planned = (
            sum(getattr(one, name) or 0 for one in measured) for name in ("step_written", "planned_written")
        )
        text += (
            f"; a step writes {decimal(written)}, planned {decimal(planned)}, and waits "
            f"{formatting.duration(slowest.step_wait)}, planned {formatting.duration(slowest.predicted_wait)} "
            f"(rank {slowest.rank}, the longest)"
        )
    else:
        text += "; no step that had a plan is over"
    lines = [text]
    for rank, end in sorted(ends, key=lambda each: each[1].at)[-SHOWN:]:
        remedy = f". {end.remedy}" if end.remedy else ""
        lines.append(
            f"offloading of rank {rank} ended after {formatting.duration(end.at - start)}: {end.directory}: "
            f"{end.error}{remedy}"
        )
    if len(ends) > SHOWN:
        lines.append(f"{formatting.count(len(ends) - SHOWN, 'earlier end')} not shown; --json has all")
    return lines
