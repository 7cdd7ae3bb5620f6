"""The lanes of a report's timeline: of each node where its time went, its workers, and its checkpoints."""

from collections.abc import Iterator

from fastckpt._core.report.events import Event, nanoseconds, text, whole
from fastckpt._core.report.goodput import DOWN, REPEATED, STALL, TRAINING, USEFUL, Span, trains_from
from fastckpt._core.report.launches import LaunchRound
from fastckpt._core.report.report import Placed, Recovery, Report
from fastckpt_run import formatting
from fastckpt_run.views.chart import Axis, Bar

MOST_RANKS = 32
"""Workers of a node that have a lane."""
_CHECKPOINTS = {"persisted": "persist", "flush_done": "flush", "uploaded": "upload"}
_PHASES = ("detection", "stop", "down", "rendezvous", "start", "imports", "setup", "resume", "steps")
_MARKS = {"persist_failed": "failure", "upload_failed": "failure", "bad_checkpoint": "failure", "skipped": "skip"}


def axis_of(found: Report) -> Axis:
    """The time of all launches."""
    placed = [placed for chain in found.nodes.values() for placed in chain]
    return Axis(min((p.begin for p in placed), default=0), max((p.end for p in placed), default=0))


def time_lane(chain: list[Placed], shortest: int) -> Iterator[Bar]:
    """The bars of a node's time; in a stretch of steps, repeated work is drawn first, then stalls.

    Stretches of steps are put together until they are ``shortest`` nanoseconds long.
    """
    last: Placed | None = None
    for placed in chain:
        if last is not None and last.launch.outcome != "succeeded" and placed.begin > last.end:
            gap = f"{formatting.CAUSES[DOWN]}: {formatting.duration(placed.begin - last.end)}"
            yield Bar(last.end, placed.begin, DOWN, gap)
        last = placed
        for span in _together(placed.spent.spans, shortest):
            yield from _bars(span, placed.offset)


def _together(spans: list[Span], shortest: int) -> Iterator[Span]:
    waiting: Span | None = None
    for span in spans:
        if waiting is not None:
            if span.shares.keys() <= TRAINING and waiting.end - waiting.begin < shortest:
                shares = {cause: waiting.shares.get(cause, 0) + span.shares.get(cause, 0) for cause in TRAINING}
                waiting = Span(waiting.begin, span.end, shares)
                continue
            yield waiting
        waiting = span if span.shares.keys() <= TRAINING else None
        if waiting is None:
            yield span
    if waiting is not None:
        yield waiting


def _bars(span: Span, offset: int) -> Iterator[Bar]:
    begin, useful = span.begin + offset, span.shares.get(USEFUL, 0)
    if useful:  # below the others, so that there are no gaps between them
        yield Bar(begin, span.end + offset, USEFUL, f"{formatting.CAUSES[USEFUL]}: {formatting.duration(useful)}")
    parts = [(cause, span.shares[cause]) for cause in (REPEATED, STALL) if span.shares.get(cause)]
    parts += [(cause, part) for cause, part in span.shares.items() if part and cause not in TRAINING]
    for cause, part in parts:
        yield Bar(begin, begin + part, cause, f"{formatting.CAUSES[cause]}: {formatting.duration(part)}")
        begin += part


def ranks(chain: list[Placed]) -> list[int]:
    """The local ranks that a node ever had."""
    rounds = [one for placed in chain for one in placed.launch.rounds]
    return sorted({rank for one in rounds for rank in (*one.pids, *one.joined)})


def worker_lane(chain: list[Placed], rank: int) -> Iterator[Bar]:
    """The lives of the workers that had a local rank: their start, their load, their steps, and how they failed."""
    for placed in chain:
        for one in placed.launch.rounds:
            if one.started is not None and rank in one.pids:
                yield from _life(placed, one, rank)


def _life(placed: Placed, one: LaunchRound, rank: int) -> Iterator[Bar]:
    begin = one.started or one.begin
    ends = [at for at in (one.failure.at if one.failure else None, one.stopped, one.finished) if at is not None]
    end = max(begin, min(ends, default=placed.launch.end))
    imported, joined, load, pid = one.imported.get(rank), one.joined.get(rank), one.loads.get(rank), one.pids[rank]
    steps = load.at if load else trains_from(one) and joined
    cuts = [(begin, "imports", f"pid {pid}: start and imports"), (imported, "setup", f"pid {pid}: set-up")]
    if load:
        whence = f"step {load.step} from {load.tier}" if load.tier else "nothing to resume"
        cuts.append((load.at - load.seconds, "resume", f"load: {whence}, {formatting.duration(load.seconds)}"))
    cuts.append((steps, "steps", "takes steps"))
    known = [(max(begin, min(at, end)), kind, title) for at, kind, title in cuts if at is not None]
    for (at, kind, title), (until, _, _) in zip(known, [*known[1:], (end, "", "")], strict=True):
        if until > at:
            yield Bar(at + placed.offset, until + placed.offset, kind, title)


def checkpoint_lane(chain: list[Placed]) -> Iterator[Bar]:
    """Persists, flushes and uploads, as long as they took; those that failed or were skipped."""
    for placed in chain:
        for event in placed.launch.events:
            if (bar := _checkpoint(event)) is not None:
                yield Bar(bar.begin + placed.offset, bar.end + placed.offset, bar.kind, bar.title)


def _checkpoint(event: Event) -> Bar | None:
    name, at = event["event"], round(event["monotonic"] * 1e9)
    step = f"step {whole(event, 'step', -1)}"
    if name in _CHECKPOINTS:
        took = max(0, nanoseconds(event, "seconds") or 0)
        title = f"{step} {name.replace('_', ' ')} in {formatting.duration(took)}, {whole(event, 'bytes', 0):,} bytes"
        return Bar(at - took, at, _CHECKPOINTS[name], title)
    if name in _MARKS:
        return Bar(
            at, at, _MARKS[name], f"{step} {name.replace('_', ' ')}: {text(event, 'error') or text(event, 'reason')}"
        )
    return None


def failure_bars(one: Recovery) -> Iterator[Bar]:
    """Phases that followed a failure, in order, up to the first step; in nanoseconds since it began."""
    begin = -one.silent
    load = None if one.resumed is None else one.resumed - (one.load or 0)
    instants = (0, one.stopped, one.relaunched, one.met, one.started, one.imported, load, one.resumed, one.first_step)
    for instant, kind in zip(instants, _PHASES, strict=True):
        if instant is not None and instant > begin:
            name = "first step" if kind == "steps" else formatting.CAUSES[kind]
            yield Bar(begin, instant, kind, f"{name}: {formatting.duration(instant - begin)}")
            begin = instant
