"""The text of a report that people read: its tables and facts in the terminal, and the parts that the page shares."""

import time
from collections.abc import Iterator, Sequence

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.report.frequency import DecidedIntervals
from fastckpt._core.report.host_failures import HostFailures
from fastckpt._core.report.report import Counts, Recovery, Report
from fastckpt._core.report.slow_spells import SlowSpell
from fastckpt_run import formatting
from fastckpt_run.cli.output import Screen
from fastckpt_run.views import offload_text

SHOWN = 20
"""Changes of the frequency, and jobs that superseded this one, that are shown at most: the newest."""
_INSTANTS = ("stopped", "met", "started", "imported", "joined", "resumed", "first_step")
_HEADS = ("AT", "STOPPED", "MET", "STARTED", "IMPORTED", "JOINED", "RESUMED", "FIRST STEP", "STEP", "FROM", "REPEATED")


def show(screen: Screen, found: Report, directory: str) -> None:
    """Print a report in the terminal."""
    launches = sum(len(chain) for chain in found.nodes.values())
    if not launches:
        screen.line(f"{directory}: no launch of fastckpt-run is logged; under torchrun there is no agent that logs")
        return
    screen.line(
        f"{directory}: {formatting.count(launches, 'launch', 'launches')} "
        f"on {formatting.count(len(found.nodes), 'node')}, "
        f"{formatting.duration(found.total)}; goodput {formatting.goodput(found.goodput)}"
    )
    causes = [(cause, spent) for cause, spent in found.lost.items() if spent]
    rows = [
        [formatting.CAUSES[cause], formatting.share(spent, found.total), formatting.duration(spent)]
        for cause, spent in causes
    ]
    screen.table(["CAUSE", ">SHARE", ">TIME"], rows)
    for line in facts(found):
        screen.line(line)
    start = min(placed.begin for chain in found.nodes.values() for placed in chain)
    if changes := [one for one in found.decisions if one.matters]:
        screen.table(
            [">AT", ">AFTER STEP", ">SNAPSHOT", ">PERSIST", ">COST", "WHY"],
            [change(one, start) for one in changes[-SHOWN:]],
        )
        if len(changes) > SHOWN:
            screen.line(f"{formatting.count(len(changes) - SHOWN, 'earlier change')} not shown; --json has all")
    offload_text.show(screen, found)
    if found.failures:
        screen.table(
            ["FAILURE", *(f">{name}" for name in _HEADS)],
            [_row(one, start, len(found.nodes)) for one in found.failures],
        )
        for one in found.failures:
            if one.log:
                screen.line(f"rank {one.rank}, {formatting.duration(one.at - start)}: {formatting.where(one)}")


def _row(one: Recovery, start: int, nodes: int) -> list[str]:
    instants = [formatting.duration(getattr(one, name)) for name in _INSTANTS]
    step = "?" if one.step is None else "none" if one.step < 0 else str(one.step)
    return [
        formatting.failure(one, nodes=nodes),
        formatting.duration(one.at - start),
        *instants,
        step,
        one.tier or "-",
        str(one.repeated),
    ]


def change(one: DecidedIntervals, start: int) -> list[str]:
    """A line on new intervals: from which step they apply, the cost of checkpoints until then, and the reason."""
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
    counts, steps = found.counts, found.steps
    stall = found.lost["stall"] // counts.saves // len(found.nodes) if counts.saves else 0
    each = f", each stalls for {formatting.duration(stall)}" if counts.saves else ""
    rate = (
        f" at {formatting.rate(counts.persisted_bytes / counts.persist_time * 1e3)} MB/s" if counts.persist_time else ""
    )
    lines = [
        f"steps: {steps.new:,} done, {steps.repeated:,} repeated"
        + (
            f", {formatting.rate(rate_of_steps)} per second of useful time"
            if (rate_of_steps := found.steps_per_second) is not None
            else ""
        ),
        f"saves: {counts.saves:,} of {decimal(counts.saved_bytes)} in all{each}; {counts.skipped:,} skipped",
        f"persists: {counts.persisted:,} of {decimal(counts.persisted_bytes)} in all{rate}; "
        f"{counts.persist_failures:,} attempts failed",
    ]
    lines += _measurements(found)
    if found.decisions:
        lines.append(f"frequency: {formatting.frequency(found.decisions)}")
    lines += [*_uploads(counts), *_copies(counts)]
    start = min((placed.begin for chain in found.nodes.values() for placed in chain), default=0)
    lines += offload_text.facts(found, start)
    for one in found.superseded[-SHOWN:]:
        lines.append(f"superseded in {one.place} at {when(one.at)}: history {one.history:,} is that of {one.holder}")
    lines += [_slow(one, start) for one in found.slow[-SHOWN:]]
    if len(found.slow) > SHOWN:
        lines.append(f"{formatting.count(len(found.slow) - SHOWN, 'earlier slow rank')} not shown; --json has all")
    if found.hosts:
        lines.append(f"failures by host: {hosts(found.hosts)}")
    if counts.bad_checkpoints:
        lines.append(f"bad checkpoints met: {counts.bad_checkpoints:,}")
    if found.unreadable or found.events_lost:
        lines.append(
            f"not known: {found.unreadable:,} lines of the logs cannot be read, {found.events_lost:,} were lost"
        )
    return lines


def _uploads(counts: Counts) -> Iterator[str]:
    if counts.uploads or counts.upload_failures:
        newest = f"; the newest that arrived is step {counts.newest_upload[1]:,}" if counts.newest_upload else ""
        yield f"uploads: {counts.uploads:,}; {counts.upload_failures:,} attempts failed{newest}"


def _copies(counts: Counts) -> Iterator[str]:
    if counts.copied or counts.copies_skipped:
        newest = counts.newest_copied
        all_made = f"; the newest that all nodes have made is step {newest[1]:,}" if newest else ""
        back = f"; {decimal(counts.fetched_bytes)} brought back" if counts.fetched_bytes else ""
        saves = f"{counts.copied:,} saves, {decimal(counts.copied_bytes)} in all; {counts.copies_skipped:,} skipped"
        yield f"copies on other hosts: {saves}{all_made}{back}"


def _slow(one: SlowSpell, start: int) -> str:
    """A time in which a rank was slow, in words."""
    until = "to the end" if one.end is None else f"for {formatting.duration(one.end - one.begin)}"
    found = f"found after {formatting.duration(one.begin - start)}, {until}"
    return f"slow rank: {one.host}, rank {one.rank}, {one.part}: the job was {100 * one.cost:.0f}% slower ({found})"


def _measurements(found: Report) -> list[str]:
    """Describe the last measurements: the durations of steps, and the values that the script logged."""
    lines = list[str]()
    for one in found.metrics[:SHOWN]:
        node = f" on node {one.node}" if len(found.metrics) > 1 else ""
        count, total = (one.number(f"fastckpt_step_seconds_{name}") for name in ("count", "sum"))
        if count and total is not None:
            bounds = [_bound(one.number(f'fastckpt_step_seconds{{quantile="{part}"}}')) for part in ("0.5", "0.99")]
            mean = formatting.duration(round(total / count * 1e9))
            lines.append(f"step times{node}: {mean} on average, half take {bounds[0]} at most, 99 % {bounds[1]}")
        if logged := one.logged():
            shown = ", ".join(f"{name} {_number(value)}" for name, value in [*logged.items()][:SHOWN])
            lines.append(f"logged{node} up to step {one.step:,}: {shown}")
    return lines


def _bound(seconds: float | None) -> str:
    return "more than was measured" if seconds is None else formatting.duration(round(seconds * 1e9))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def hosts(found: Sequence[HostFailures]) -> str:
    """The hosts that have failed most, each with how often."""

    def one(host: HostFailures) -> str:
        first = f", {host.first:,} of them first" if len(found) > 1 and host.failures else ""
        checks = f"; {formatting.count(host.checks, 'failed node check')}" if host.checks else ""
        return f"{host.host} {host.failures:,}{first}{checks}"

    more = f"; {len(found) - SHOWN:,} more hosts" if len(found) > SHOWN else ""
    return "; ".join(map(one, found[:SHOWN])) + more


def when(nanoseconds: int) -> str:
    """An instant since the epoch, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(nanoseconds // 10**9))
