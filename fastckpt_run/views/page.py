"""A report as one page of HTML: no script, nothing from the network; all that comes from a log is escaped."""

from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files

from fastckpt._core.report.report import Recovery, Report, incidents
from fastckpt_run import formatting
from fastckpt_run.cli.output import plain
from fastckpt_run.views import offload_text, timeline
from fastckpt_run.views.chart import HATCHES, Axis, Bar, lane
from fastckpt_run.views.report_text import change, facts, when

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_TICKS = 6
_STRETCHES = 100
_CHECKPOINT_KINDS = {kind: kind for kind in ("persist", "flush", "upload", "failure")} | {"skip": "skipped save"}
_MOST_FAILURES = _MOST_CHANGES = 200


def page(found: Report, directory: str) -> str:
    """The whole page."""
    style = files("fastckpt_run.views").joinpath("page.css").read_text(encoding="utf-8")
    title = _text(f"What happened in {directory}")
    body = "".join(sections(found).values())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>\n{style}</style></head>\n'
        f"<body>{HATCHES}<main><h1>{title}</h1>\n{body}</main></body></html>\n"
    )


def sections(found: Report) -> dict[str, str]:
    """The parts of the page, by name, in their order; those without contents are empty."""
    return {
        "summary": _summary(found),
        "time": _time(found),
        "timeline": _timeline(found),
        "frequency": _frequency(found),
        "offloading": _offloading(found),
        "failures": _failures(found),
        "launches": _launches(found),
    }


def _text(value: object) -> str:
    return escape(plain(str(value)))


def _summary(found: Report) -> str:
    launches = sum(len(chain) for chain in found.nodes.values())
    figures = [
        (formatting.goodput(found.goodput) if found.goodput is not None else "?", "goodput: useful part of all time"),
        (formatting.duration(found.total), f"in {formatting.count(launches, 'launch', 'launches')}"),
        (f"{found.steps.new:,}", f"steps, and {found.steps.repeated:,} once more"),
        (f"{len(incidents(found.failures)):,}", "failures"),
    ]
    cards = "".join(f"<div><b>{_text(value)}</b><span>{_text(what)}</span></div>" for value, what in figures)
    listed = "".join(f"<li>{_text(line)}</li>" for line in facts(found))
    return f'<section class="figures">{cards}</section>\n<ul class="facts">{listed}</ul>\n'


def _time(found: Report) -> str:
    causes = [(cause, spent) for cause, spent in found.lost.items() if spent]
    whole, begin, bars = Axis(0, found.total), 0, list[Bar]()
    for cause, spent in causes:
        bars.append(Bar(begin, begin + spent, cause, formatting.CAUSES[cause]))
        begin += spent
    rows = [
        [
            f'<i class="{cause}"></i>{formatting.CAUSES[cause]}',
            formatting.share(spent, found.total),
            formatting.duration(spent),
        ]
        for cause, spent in causes
    ]
    return (
        f'<section><h2>Where the time went</h2><div class="whole">{lane(bars, whole)}</div>'
        f"{_table(['cause', 'share', 'time'], rows)}</section>\n"
    )


def _timeline(found: Report) -> str:
    axis = timeline.axis_of(found)
    shown, used = list[str](), dict[str, str]()

    def add(name: str, bars: Iterable[Bar]) -> None:
        bars = list(bars)
        used.update({bar.kind: formatting.CAUSES.get(bar.kind) or _CHECKPOINT_KINDS.get(bar.kind, "") for bar in bars})
        shown.append(f'<div class="lane"><span>{_text(name)}</span>{lane(bars, axis)}</div>')

    for node, chain in found.nodes.items():
        prefix = f"{node}: " if len(found.nodes) > 1 else ""
        add(f"{prefix}time", timeline.time_lane(chain, (axis.end - axis.begin) // _STRETCHES))
        there = timeline.ranks(chain)
        for rank in there[: timeline.MOST_RANKS]:
            add(f"{prefix}worker {rank}", timeline.worker_lane(chain, rank))
        if len(there) > timeline.MOST_RANKS:
            shown.append(f"<p>{len(there) - timeline.MOST_RANKS} more workers are not shown.</p>")
        add(f"{prefix}storage", timeline.checkpoint_lane(chain))
    failures = [
        Bar(one.at, one.at, "failure", formatting.failure(one, nodes=len(found.nodes))) for one in found.failures
    ]
    add("failures", failures)
    ticks = "".join(
        f'<span style="left:{100 * axis.at(axis.begin + tick):.2f}%">{label}</span>'
        for tick, label in axis.ticks(_TICKS)
    )
    legend = "".join(f'<li><i class="{kind}"></i>{_text(name)}</li>' for kind, name in used.items() if name)
    return (
        f"<section><h2>Timeline</h2><p>Since {when(axis.begin)}{', node by node' if len(found.nodes) > 1 else ''}. "
        f"Point at a bar to read what it is.</p>"
        f'<div class="chart">{"".join(shown)}<div class="axis"><span></span><div>{ticks}</div></div></div>'
        f'<ul class="legend">{legend}</ul></section>\n'
    )


def _frequency(found: Report) -> str:
    changes = [one for one in found.decisions if one.matters]
    if not changes:
        return ""
    start, last = timeline.axis_of(found).begin, changes[-_MOST_CHANGES:]
    rows = [[_text(cell) for cell in change(one, start)] for one in last]
    rows = [[*cells, f'<div class="why">{why}</div>'] for *cells, why in rows]
    heads = ["at", "step", "snapshot", "persist", "cost", "why"]
    return (
        "<section><h2>How often it saves</h2><p>From after a step on: steps between snapshots and between persists, "
        f"and what checkpoints had cost until then.</p>{_earlier(len(changes) - len(last))}{_table(heads, rows)}"
        "</section>\n"
    )


def _offloading(found: Report) -> str:
    if not found.offloaded:
        return ""
    last = offload_text.shown(found)
    rows = [[_text(cell) for cell in offload_text.row(one)] for one in last]
    heads = [name.removeprefix(">").lower() for name in offload_text.HEADS]
    others = len(found.offloaded) - len(last)
    return (
        "<section><h2>Offloaded activations</h2><p>Of a step of each rank, those that wait longest: bytes written and "
        f"planned, time waited and predicted, bytes that stay in memory.</p>"
        f"{f'<p>{others:,} more ranks are not shown.</p>' if others else ''}{_table(heads, rows)}</section>\n"
    )


def _earlier(count: int) -> str:
    return f"<p>{count:,} earlier ones are not shown.</p>" if count else ""


def _failures(found: Report) -> str:
    if not found.failures:
        return "<section><h2>Failures</h2><p>None.</p></section>\n"
    start = timeline.axis_of(found).begin
    last = found.failures[-_MOST_FAILURES:]
    longest = max(_length(one) for one in last)
    rows = [list(_failure(one, start, longest, len(found.nodes))) for one in last]
    heads = ["at", "what", "went on", "from", "steps repeated", "phases, up to the first step"]
    return f"<section><h2>Failures</h2>{_earlier(len(found.failures) - len(last))}{_table(heads, rows)}</section>\n"


def _length(one: Recovery) -> int:
    return one.silent + max(at or 0 for at in (one.stopped, one.met, one.started, one.resumed, one.first_step))


def _failure(one: Recovery, start: int, longest: int, nodes: int) -> Iterator[str]:
    yield formatting.duration(one.at - start)
    yield _text(formatting.failure(one, nodes=nodes)) + (
        f'<div class="why">{_text(formatting.where(one))}</div>' if one.host else ""
    )
    yield "?" if one.first_step is None else formatting.duration(one.silent + one.first_step)
    yield "?" if one.step is None else _text(f"step {one.step}, {one.tier}") if one.tier else "the beginning"
    yield f"{one.repeated:,}"
    yield f'<div class="phases">{lane(timeline.failure_bars(one), Axis(-one.silent, longest - one.silent))}</div>'


def _launches(found: Report) -> str:
    rows = list[list[str]]()
    for node, placed in ((node, placed) for node, chain in found.nodes.items() for placed in chain):
        launch, took = placed.launch, formatting.duration(placed.end - placed.begin)
        outcome = launch.outcome or "runs, or was killed"
        rows.append([str(node), _text(launch.host), when(placed.begin), took, _text(outcome), _text(launch.script)])
    heads = ["node", "host", "begin", "time", "outcome", "script"]
    return f"<section><h2>Launches</h2>{_table(heads, rows)}</section>\n"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
