"""The summary that the agent logs at the end of a job: three lines, or its checkpoints and where its time went."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from textwrap import shorten

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import decimal
from fastckpt._core.config import FULL, Settings
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.report.events import find, parsed
from fastckpt._core.report.goodput import USEFUL
from fastckpt._core.report.launches import Launch
from fastckpt._core.report.report import Recovery, Report
from fastckpt._core.report.report import report as report_on
from fastckpt._core.saver.stats import Copies, ReplicaCounts, SaverStats
from fastckpt.errors import FastckptError, NotDurable
from fastckpt_run import formatting

logger = logging.getLogger("fastckpt.report")

_SHOWN = 5
"""Reasons, bad checkpoints, failures and directories that are shown, at most."""
_LONGEST = 200
"""Characters of a message in a short summary."""
_SMALLEST = 1000
"""The part of all time that a cause must have to be shown: one of so many."""


def report(all_stats: Iterable[SaverStats], settings: Settings) -> None:
    """Record the outcome of each checkpoint directory as an event; in a full summary, log a block for each."""
    for stats in all_stats:
        lines = list(_lines(stats)) if settings.summary == FULL else []
        if lines:
            logger.info("%s", "\n".join([f"checkpoints in {stats.directory}", *lines]))
        metrics.event(
            "report",
            directory=str(stats.directory),
            persisted=stats.persisted,
            bytes=stats.size,
            seconds=stats.seconds,
            newest_durable=stats.durable,
            not_durable=stats.lacking,
            overtaken=stats.overtaken,
            skipped=dict(stats.skips),
            persist_failures=stats.failures,
            last_failure=stats.last_failure,
            missed=len(stats.asked),
            bad=stats.bad,
            resumes=dict(stats.resumes),
            remote=stats.remote and asdict(stats.remote),
            replicas=asdict(stats.replicas),
        )


def log_course(lines: Iterable[bytes], all_stats: Iterable[SaverStats], settings: Settings) -> None:
    """Log how this launch went, by its events: in full where its time went; in short, all in three lines.

    Nothing is logged of a launch that has neither steps nor checkpoints.
    """
    found, every = _report_on(lines), list(all_stats)
    has_steps = found is not None and found.goodput is not None
    used = every if has_steps else [stats for stats in every if any(_lines(stats))]
    if settings.summary == FULL:
        if found is not None and has_steps:
            logger.info("%s", "\n".join(_time(found)))
    elif used or has_steps:
        last = _last_failure(found)
        course = [_ending(found, last), _course(found, used)] if found is not None else [_states(used)]
        logger.info("%s", "\n  ".join([*course, _further(last, used, settings)]))


def _report_on(lines: Iterable[bytes]) -> Report | None:
    try:
        return report_on([parsed(Path(), lines)])
    # A fault of the report must not turn a job that succeeded into one that failed.
    except (ArithmeticError, LookupError, TypeError, ValueError):
        logger.exception("cannot compute the goodput of this launch")
        return None


def _last_failure(found: Report | None) -> Recovery | None:
    """The last failure, unless the workers were started again after it."""
    last = found.failures[-1] if found is not None and found.failures else None
    return last if last is not None and last.started is None else None


def _launches(found: Report) -> list[Launch]:
    return [placed.launch for chain in found.nodes.values() for placed in chain]


def _ending(found: Report, last: Recovery | None) -> str:
    """A line: the script, its outcome, the time that it took, and the failure that ended it."""
    launch = next(iter(_launches(found)), None)
    outcome = launch.outcome if launch is not None else ""
    how = {"stopped": "was stopped", "": "has ended"}.get(outcome, outcome)
    script = _one_line(launch.script) if launch is not None else ""
    why = f": {_one_line(formatting.what(last))}" if last is not None and outcome == "failed" else ""
    return f"{script or 'the job'} {how} after {formatting.duration(found.total)}{why}"


def _course(found: Report, used: Sequence[SaverStats]) -> str:
    """A line: steps done and repeated, restarts, and the state of each checkpoint directory."""
    rounds = [one for launch in _launches(found) for one in launch.rounds]
    restarts = max(0, sum(one.started is not None for one in rounds) - 1)
    figures = [formatting.count(restarts, "restart") if restarts else "no restart"]
    if found.goodput is not None:
        resumed = max((load.step for one in rounds[:1] for load in one.loads.values()), default=-1)
        since = f" after step {resumed}" if resumed >= 0 else ""
        steps = [f"{formatting.count(found.steps.new, 'step')} done{since}", f"{found.steps.repeated:,} repeated"]
        figures = [*steps, *figures, f"goodput {formatting.goodput(found.goodput)}"]
    return "; ".join(filter(None, [", ".join(figures), _states(used)]))


def _states(used: Sequence[SaverStats]) -> str:
    """The newest durable checkpoint and the faults of each directory; those with faults come first."""
    states = sorted(((stats, [*_faults(stats)]) for stats in used), key=lambda state: not state[1])
    texts = [f"in {stats.directory} {', '.join([_newest(stats), *faults])}" for stats, faults in states]
    more = f"and {formatting.count(len(used) - _SHOWN, 'directory', 'directories')} more" if len(used) > _SHOWN else ""
    return "; ".join(filter(None, [*texts[:_SHOWN], more]))


def _newest(stats: SaverStats) -> str:
    if stats.durable:
        return f"{stats.durable} is durable"
    if _has_nothing(stats):
        return f"NOTHING is durable: {_one_line(_why_nothing(stats))}"
    return "no save is durable" if stats.saves or stats.never_whole else "nothing was saved"


def _faults(stats: SaverStats) -> Iterator[str]:
    if stats.failures:
        why = "" if _has_nothing(stats) else f": {_one_line(stats.last_failure)}"  # already reported there
        yield f"{formatting.count(stats.failures, 'persist')} failed{why}"
    if stats.lacking:
        yield f"{stats.lacking} is NOT durable"
    if stats.asked:
        yield f"{formatting.count(len(stats.asked), 'checkpoint')} missed that should have been persisted"
    yield from _faults_elsewhere(stats)
    if stats.skips:
        [(reason, _)] = stats.skips.most_common(1)
        yield f"{formatting.count(stats.skips.total(), 'save')} skipped, as {_one_line(reason)}"
    if stats.bad:
        yield f"{formatting.count(len(stats.bad), 'checkpoint')} could not be used"


def _faults_elsewhere(stats: SaverStats) -> Iterator[str]:
    if (copies := stats.remote) is not None:
        if _is_not_remote(copies, stats.durable):
            yield f"it is NOT in {copies.location}"
        if copies.failures:
            yield f"{formatting.count(copies.failures, 'upload')} failed: {_one_line(copies.last_failure)}"
    if (stats.replicas.saves or stats.replicas.skipped) and not stats.replicas.newest:
        yield "NO save in memory is safe from the loss of this host"


def _one_line(text: str) -> str:
    return shorten(text, _LONGEST, placeholder=" ...")


def _further(last: Recovery | None, used: Sequence[SaverStats], settings: Settings) -> str:
    """A line: the command that shows more, and the log of the worker that ended the job by its failure."""
    logged = [stats.directory for stats in used if _has_log(stats.directory)] if settings.event_log else []
    logged += [settings.events] if settings.events else []
    log = f"; log of rank {last.rank}: {last.log}" if last is not None and last.log else ""
    return f"more: fastckpt report {quote(logged[0])}{log}" if logged else f"more: --fast-summary full{log}"


def _has_log(directory: str) -> bool:
    try:
        return bool(find(directory))
    except (FastckptError, OSError):
        return False


def _time(found: Report) -> Iterator[str]:
    yield f"{formatting.duration(found.total)}, of which"
    causes = sorted(found.lost.items(), key=lambda item: (item[0] != USEFUL, -item[1]))
    for cause, spent in causes:
        if cause == USEFUL or spent * _SMALLEST > found.total:
            more = f", {formatting.count(found.steps.new, 'step')}" if cause == USEFUL else ""
            share, duration = formatting.share(spent, found.total), formatting.duration(spent)
            yield f"  {formatting.CAUSES[cause]:19} {share:>8}  {duration}{more}"
    for one in found.failures[-_SHOWN:]:
        yield f"  {formatting.failure(one)}; {formatting.recovery(one)}"
    if (earlier := len(found.failures) - _SHOWN) > 0:
        yield f"  and {formatting.count(earlier, 'failure')} before"


def require_durable(all_stats: Collection[SaverStats], *, newest: bool) -> None:
    """Raise if a script has saved, and nothing of it is durable that was to be; with ``newest``, if the newest is not.

    Raises:
        NeverWhole: None of its saves came to be whole.
        NotDurable: They are in memory at most.
    """
    nothing = not any(stats.has_durable for stats in all_stats)
    for stats in all_stats if nothing or newest else ():
        if stats.lacking is not None:
            newest_durable = f"the newest that is is {stats.durable}" if stats.durable else "none is"
            why = stats.last_failure.rstrip(".") or "it was not done in time"
            raise NotDurable(
                coded(
                    f"the script succeeded, but {stats.lacking} is not durable in {stats.directory}, and "
                    f"{newest_durable}: {why}. Launch the job here again: it resumes from what is kept in memory, and "
                    "persists it.",
                    "FC-025",
                )
            )
    if nothing and not any(stats.saves for stats in all_stats):
        for stats in (stats for stats in all_stats if stats.never_whole):
            [(why, _)] = stats.skips.most_common(1) or [("not every rank has saved the same steps", 0)]
            text = f"the script succeeded, but none of its saves came to be whole in {stats.directory}: {why}"
            raise NeverWhole(coded(text, "FC-007"))


class NeverWhole(FastckptError):
    """A script has saved, and there is no checkpoint."""


def _lines(stats: SaverStats) -> Iterator[str]:
    if stats.persisted:
        size = f"{decimal(stats.size)} in {stats.seconds:.1f} s"
        yield f"  persisted    {formatting.count(stats.persisted, 'checkpoint')}, {size}"
    if stats.overtaken:
        yield f"  overtaken    {formatting.count(stats.overtaken, 'save')}: a newer one was persisted instead"
    yield from _durable(stats)
    if stats.remote:
        yield from _remote(stats.remote, stats.durable)
    yield from _replicas(stats.replicas)
    if stats.skips:
        yield f"  skipped      {formatting.count(stats.skips.total(), 'save')}"
        yield from _reasons(stats.skips)
    yield from _trouble(stats)
    if stats.resumes:
        times = (f"{formatting.count(n, 'time')} from {tier}" for tier, n in sorted(stats.resumes.items()))
        yield f"  resumed      {', '.join(times)}"
    if stats.bad:
        yield f"  bad          {formatting.count(len(stats.bad), 'checkpoint')}"
        yield from (f"               {text}" for text in stats.bad[-_SHOWN:])


def _has_nothing(stats: SaverStats) -> bool:
    return bool(stats.saves or stats.wanted or stats.never_whole) and not stats.has_durable


def _durable(stats: SaverStats) -> Iterator[str]:
    if stats.durable:
        yield f"  durable      {stats.durable}"
    elif _has_nothing(stats):
        yield f"  durable      NOTHING is durable: {_why_nothing(stats)}"
    if stats.lacking:
        yield f"  not durable  {stats.lacking}"


def _remote(copies: Copies, durable: SaveId | None) -> Iterator[str]:
    newest = f"the newest there is {copies.newest}" if copies.newest else "none is known to be there"
    yield f"  remote       {copies.location}: {formatting.count(copies.uploaded, 'checkpoint')} uploaded; {newest}"
    if copies.failures:
        yield f"  failed       {formatting.count(copies.failures, 'upload')}, the last one: {copies.last_failure}"
    if _is_not_remote(copies, durable):
        yield f"  not remote   {durable}"


def _is_not_remote(copies: Copies, durable: SaveId | None) -> bool:
    return durable is not None and (copies.newest is None or copies.newest < durable)


def _replicas(copies: ReplicaCounts) -> Iterator[str]:
    if copies.saves or copies.skipped:
        skipped = f"; {copies.skipped} skipped" if copies.skipped else ""
        newest = f", the newest that all nodes have made is {copies.newest}"
        nothing = "; NO save in memory is safe from the loss of this host"
        copied = f"{formatting.count(copies.saves, 'save')}, {decimal(copies.size)}{skipped}"
        yield f"  copied       {copied}{newest if copies.newest else nothing}"


def _why_nothing(stats: SaverStats) -> str:
    if stats.failures:
        return stats.last_failure
    if stats.saves:
        return f"{formatting.count(stats.saves, 'checkpoint')} came to be whole in memory, and no further"
    return "no save came to be whole in memory"


def _trouble(stats: SaverStats) -> Iterator[str]:
    if stats.failures:
        yield f"  failed       {formatting.count(stats.failures, 'persist')}, the last one: {stats.last_failure}"
    if stats.asked:
        yield f"  missed       {formatting.count(len(stats.asked), 'checkpoint')} that should have been persisted"


def _reasons(skips: Counter[str]) -> Iterator[str]:
    return (f"               {count} as {reason}" for reason, count in skips.most_common(_SHOWN))
