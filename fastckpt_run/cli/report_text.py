"""The text of a report that people read, in the terminal and on the page: changes of the frequency, facts, instants."""

import time

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.report.frequency import DecidedIntervals
from fastckpt._core.report.report import Report
from fastckpt_run import formatting

SHOWN = 20
"""How many changes of the frequency, and jobs that superseded this one, are shown: the newest."""


def change(one: DecidedIntervals, start: int) -> list[str]:
    """When intervals came to be in force, which, what checkpoints cost until then, and why they did."""
    memory, storage = (f"{steps:,}" if steps else "-" for steps in (one.memory, one.storage))
    return [
        formatting.duration(one.at - start),
        f"{one.step:,}",
        memory,
        storage,
        formatting.part(one.overhead),
        one.why,
    ]


def facts(found: Report) -> list[str]:
    """Steps and checkpoints, in words."""
    counts, steps, useful = found.counts, found.steps, found.lost["useful"]
    stall = found.lost["stall"] // counts.saves // len(found.nodes) if counts.saves else 0
    each = f", each stalls for {formatting.duration(stall)}" if counts.saves else ""
    rate = (
        f" at {formatting.rate(counts.persisted_bytes / counts.persist_time * 1e3)} MB/s" if counts.persist_time else ""
    )
    lines = [
        f"steps: {steps.new:,} done, {steps.repeated:,} repeated"
        + (
            f", {formatting.rate(steps.new * len(found.nodes) * 1e9 / useful)} per second of useful time"
            if useful
            else ""
        ),
        f"saves: {counts.saves:,} of {decimal(counts.saved_bytes)} in all{each}; {counts.skipped:,} skipped",
        f"persists: {counts.persisted:,} of {decimal(counts.persisted_bytes)} in all{rate}; "
        f"{counts.persist_failures:,} attempts failed",
    ]
    if found.decisions:
        lines.append(f"frequency: {formatting.frequency(found.decisions)}")
    if counts.uploads or counts.upload_failures:
        newest = f"; the newest that arrived is step {counts.newest_upload[1]:,}" if counts.newest_upload else ""
        lines.append(f"uploads: {counts.uploads:,}; {counts.upload_failures:,} attempts failed{newest}")
    for one in found.superseded[-SHOWN:]:
        lines.append(f"superseded in {one.place} at {when(one.at)}: history {one.history:,} is that of {one.holder}")
    if counts.bad_checkpoints:
        lines.append(f"bad checkpoints met: {counts.bad_checkpoints:,}")
    if found.unreadable or found.events_lost:
        lines.append(
            f"not known: {found.unreadable:,} lines of the logs cannot be read, {found.events_lost:,} were lost"
        )
    return lines


def when(nanoseconds: int) -> str:
    """An instant since the epoch, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(nanoseconds // 10**9))
