"""The live page of a job: its parts as HTML, made of the document that `fastckpt top` shows, and of the report."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fastckpt._core.report.report import Report, incidents
from fastckpt_run import formatting
from fastckpt_run.detection.neighbor_watch import NEIGHBORS
from fastckpt_run.views import event_text
from fastckpt_run.views.chart import HATCHES
from fastckpt_run.views.page import _table as table
from fastckpt_run.views.page import _text as shown
from fastckpt_run.views.page import sections
from fastckpt_run.views.report_text import when

Json = Mapping[str, Any]

RELOAD = 5
"""Seconds after which a browser without scripts loads the page again."""
OWN = ("data", "forward", "backward", "rest")
"""Parts of a step that are a rank's own."""
LOSSES = {
    "worker": ("if a worker dies", "what memory has is resumed"),
    "node": ("if a node is lost", "with its memory: what is durable is resumed"),
    "storage": ("if the directory is lost", "what the remote store has is resumed"),
}
TIERS = ("memory", "storage", "remote")
ORDER = (
    "head", "figures", "loss", "workers", "links", "timeline", "events", "time", "failures", "values", "frequency",
    "offloading", "launches",
)  # fmt: skip
"""The parts of the page, in their order: the present first, then the past."""
MATRIX = 16
"""Nodes of which the links are shown as a matrix, at most."""
QUIET = 10.0
"""Seconds without a heartbeat after which a worker that takes steps is pointed out."""
GOOD, BUSY, BAD = "good", "busy", "bad"
_MOOD = {"trains": GOOD, "ends": BUSY, "starts": BUSY, "waits for nodes": BUSY}


@cache
def _asset(name: str) -> str:
    return files("fastckpt_run.views").joinpath(name).read_text(encoding="utf-8")


@cache
def style() -> str:
    """The style sheet: that of a report, and the live page's additions."""
    return _asset("page.css") + _asset("live.css")


def script() -> str:
    """The script that brings the page up to date."""
    return _asset("live.js")


def policy() -> str:
    """The Content-Security-Policy: this style sheet, this script, and questions to the agent that served it.

    Attributes of styles have the places of marks on an axis; nothing from a log is ever in one.
    """
    own, code = _hash(style()), _hash(script())
    return (
        f"default-src 'none'; script-src '{code}'; style-src '{own}'; style-src-attr 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def html(parts: Mapping[str, str]) -> str:
    """The whole page, of `live_parts` and those of the report."""
    head, *others = (f'<div data-part="{name}">{content}</div>' for name, content in parts.items())
    body = "\n".join(others)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>fastckpt</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f'<noscript><meta http-equiv="refresh" content="{RELOAD}"></noscript>'
        f'<style>{style()}</style></head>\n<body>{HATCHES}<main class="live">'
        '<div class="lost" id="lost" role="alert" hidden></div>'
        f'<div class="top">{head}{_ACTIONS}</div>\n<div class="parts">{body}</div>\n'
        "<noscript><p>Scripts are off: this page loads itself again every "
        f"{RELOAD} s, and can only be read.</p></noscript>"
        f"</main><script>{script()}</script></body></html>\n"
    )


_ACTIONS = (
    '<section class="actions" aria-label="Actions"><p id="readonly">Read only. To flush, drain or stop, open the '
    "link in the launcher's log.</p>"
    '<div id="buttons" hidden><button id="flush" type="button">Flush now</button>'
    '<input id="host" aria-label="Host to drain" placeholder="host" size="12">'
    '<button id="drain" type="button" class="danger">Drain the host</button>'
    '<button id="stop" type="button" class="danger">Stop with a flush</button></div>'
    '<p id="said" role="status"></p></section>'
)


def report_parts(found: Report) -> dict[str, str]:
    """The parts of the page that are those of `fastckpt report --html`, but for the figures, which are live."""
    parts = sections(found)
    parts.pop("summary")
    return parts if found.nodes else {name: "" for name in parts}


def live_parts(document: Json, found: Report) -> dict[str, str]:
    """The parts of the page that change from second to second, by name."""
    return {
        "head": _head(document),
        "figures": _figures(document, found),
        "loss": _losses(document),
        "workers": _workers(document),
        "links": _links(document),
        "values": _values(document),
        "events": _events(document),
    }


def mood(state: str) -> str:
    """A class for a state of the job: good, busy or bad."""
    return _MOOD.get(state, BAD)


def _head(document: Json) -> str:
    job = document["job"]
    state = job["state"]
    name = job["script"] or "a job"
    where = f"on {job['host']}" if job["host"] else ""
    nodes = document["nodes"]
    if len(nodes) > 1:
        where = f"on {formatting.count(len(nodes), 'node')}, the first of them {job['host']}"
    begun = f"since {when(round(job['begin'] * 1e9))}" if job["begin"] else ""
    details = ", ".join(filter(None, (where, begun, f"run {job['run_id']}" if job["run_id"] else "")))
    told = filter(None, (links_of(document)["awaited"], document["trouble"]))
    trouble = "".join(f'<p class="trouble">{shown(text)}</p>' for text in told)
    return (
        f'<header><h1>{shown(name)}</h1><p class="state {mood(state)}" id="state" data-mood="{mood(state)}">'
        f"{shown(state)}</p></header>"
        f'<p class="where">{shown(details)}</p>'
        f'<p class="age">As of <time>{when(round(document["at"] * 1e9))}</time>'
        f'<span id="age"></span></p>{trouble}'
    )


def _figures(document: Json, found: Report) -> str:
    steps, workers = document["steps"], list(_all_workers(document))
    alive = sum(worker["doing"] != "has ended" for _, worker in workers)
    rate = steps["now"] if steps["now"] is not None else steps["per_second"]
    failures, repeated = len(incidents(found.failures)), formatting.count(steps["repeated"], "step")
    job = document["job"]
    age = formatting.duration(round((document["at"] - job["begin"]) * 1e9)) if job["begin"] else "?"
    furthest = max((worker["step"] for _, worker in workers if worker["step"] is not None), default=None)
    figures = [
        (
            "?" if document["goodput"] is None else f"{100 * document['goodput']:.1f} %",
            "goodput: useful part of all time",
        ),
        ("?" if furthest is None else f"{furthest:,}", "step of the furthest worker"),
        ("?" if rate is None else formatting.rate(rate), "steps per second, lately"),
        (f"{alive} of {len(workers)}", "workers run"),
        (f"{failures:,}", f"{'failure' if failures == 1 else 'failures'}, {repeated} repeated"),
        (age, f"age of the job, in {formatting.count(job['launches'], 'launch', 'launches')}"),
    ]
    cards = "".join(f"<div><b>{shown(value)}</b><span>{shown(what)}</span></div>" for value, what in figures)
    return f'<section class="figures" aria-label="Figures">{cards}</section>'


def _all_workers(document: Json) -> Iterator[tuple[Json, Json]]:
    for node in document["nodes"]:
        for worker in node.get("workers", ()):
            yield node, worker


# --- the cost of a loss


def _losses(document: Json) -> str:
    if not document["loss"]:
        return (
            "<section><h2>What a loss now would cost</h2><p>No worker has a checkpointer yet: all of it.</p></section>"
        )
    several = len(document["loss"]) > 1
    blocks = "".join(_loss(one, document, named=several) for one in document["loss"])
    return f"<section><h2>What a loss now would cost</h2>{blocks}</section>"


def _loss(loss: Json, document: Json, *, named: bool) -> str:
    most = max((loss[name]["steps"] for name in LOSSES if loss[name]), default=0)
    cards = "".join(_cost(loss[name], *texts, name, most) for name, texts in LOSSES.items() if loss[name] is not None)
    title = f"<h3>{shown(loss['directory'])}</h3>" if named else f'<p class="where">{shown(loss["directory"])}</p>'
    return f'{title}<div class="losses">{cards}</div>{_tiers(loss["directory"], document)}'


def _cost(cost: Json, when_lost: str, what: str, name: str, most: int) -> str:
    part = 100 * cost["steps"] / most if most else 0
    save = f"step {cost['save'][1]:,}" if cost["save"] else "nothing"
    return (
        f'<div class="loss"><b>{formatting.count(cost["steps"], "step")}</b>'
        f"<span>{_duration(cost)} of work, {when_lost}</span>"
        f'<svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><rect class="track" width="100" '
        f'height="6"/><rect class="{name}" width="{part:.1f}" height="6"/></svg>'
        f"<span>{what}: {shown(save)}</span></div>"
    )


def _duration(cost: Json) -> str:
    text = formatting.duration(round(cost["seconds"] * 1e9)) if cost["seconds"] else "0 s"
    return f"more than {text}" if cost["at_least"] else text


def _tiers(directory: str, document: Json) -> str:
    nodes = [node for node in document["nodes"] if any(t["directory"] == directory for t in node.get("tiers", ()))]
    rows = []
    for node in nodes:
        tiers = next(t for t in node["tiers"] if t["directory"] == directory)
        row = [f"{node['node']}"] if len(nodes) > 1 else []
        row += [_tier(tiers[name]) for name in TIERS if tiers[name] is not None or name != "remote"]
        row += [f"{tiers['saves']:,}", f"{tiers['skipped']:,}"]
        row.append(f'<span class="trouble">{shown(tiers["trouble"])}</span>' if tiers["trouble"] else "")
        rows.append(row)
    if not rows:
        return ""
    heads = [*(["node"] if len(nodes) > 1 else []), *TIERS, "saves", "skipped", ""]
    if len(rows[0]) < len(heads):
        heads.remove("remote")
    for row in rows:  # nodes that do not upload
        if len(row) < len(heads):
            row.insert(heads.index("remote"), "")
    return table(heads, rows)


def _tier(tier: Json) -> str:
    if tier["step"] is None:
        return '<span class="none">nothing</span>'
    age = f", {formatting.duration(round(tier['age'] * 1e9))} old" if tier["age"] is not None else ""
    return f"step {tier['step']:,}{age}"


# --- workers


def _workers(document: Json) -> str:
    several = len(document["nodes"]) > 1
    own = {id(worker): own_times(worker) for _, worker in _all_workers(document)}
    longest = max((sum(times.values()) for times in own.values()), default=0.0)
    rows = []
    for node in document["nodes"]:
        if not node["answers"]:
            what = '<span class="trouble">does not answer</span>'
            rows.append([f"node {node['node']}", "", what, "", "", *([""] if longest else []), ""])
        for worker in node.get("workers", ()):
            rows.append(_worker(node, worker, own[id(worker)], longest, several=several))
    if not rows:
        return "<section><h2>Workers</h2><p>None has been started yet.</p></section>"
    heads = ["rank", *(["node"] if several else []), "doing", "step", *(["own time of a step"] if longest else [])]
    if not several:
        rows = [[row[0], *row[2:]] if len(row) > len(heads) + 2 else row for row in rows]
    key = (
        '<ul class="legend">' + "".join(f'<li><i class="own-{part}"></i>{part}</li>' for part in OWN) + "</ul>"
        if longest
        else ""
    )
    return f"<section><h2>Workers</h2>{table([*heads, 'heartbeat', 'process'], rows)}{key}</section>"


def _worker(node: Json, worker: Json, own: Mapping[str, float], longest: float, *, several: bool) -> list[str]:
    silent = worker["silent"]
    is_quiet = silent is not None and silent > QUIET and worker["doing"] == "takes steps"
    ended = worker["doing"] == "has ended"
    beat = "none yet" if silent is None else f"{formatting.duration(round(silent * 1e9))} ago"
    row = [
        f"<b>{worker['rank']}</b>",
        f"{node['node']}, {shown(node.get('host', ''))}",
        f'<span class="{"trouble" if ended else "doing"}">{shown(worker["doing"])}</span>{_slow(worker)}',
        "" if worker["step"] is None else f"{worker['step']:,}",
    ]
    if longest:
        row.append(_own(own, longest))
    return [*row, f'<span class="{"trouble" if is_quiet else "beat"}">{beat}</span>', str(worker["pid"])]


def links_of(document: Json) -> Json:
    """Return the links between nodes in a document; empty ones if an agent of an older version wrote it."""
    found: Json = document.get("links") or {"unheard": [], "awaited": ""}
    return found


def link_rows(document: Json) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the matrix of links, node by node; empty for a job of one node, or of very many.

    Each node listens to the next few of a ring, so that some cells are empty.
    """
    nodes = document["nodes"]
    if not 1 < len(nodes) <= MATRIX:
        return [], []
    unheard = {tuple(pair) for pair in links_of(document)["unheard"]}
    rows = []
    for node in nodes:
        own = node["node"]
        listens = {(own + away) % len(nodes) for away in range(1, NEIGHBORS + 1)} - {own}
        known = "yes" if node["answers"] else "?"
        cells = ["no" if (own, other) in unheard else known if other in listens else "" for other in range(len(nodes))]
        rows.append([f"{own} {node.get('host', '')}", *cells])
    return ["HEARS", *(str(node["node"]) for node in nodes)], rows


def unheard_lines(document: Json) -> Iterator[str]:
    """A line for each pair of which one receives nothing from the other."""
    hosts = {node["node"]: node.get("host", "") for node in document["nodes"]}
    for by, other in links_of(document)["unheard"]:
        yield f"node {by} {hosts.get(by, '')} does not hear node {other} {hosts.get(other, '')}, which answers others"


def _links(document: Json) -> str:
    heads, rows = link_rows(document)
    told = "".join(f'<p class="trouble">{shown(line)}</p>' for line in unheard_lines(document))
    cells = [[f'<span class="trouble">{shown(c)}</span>' if c == "no" else shown(c) for c in row] for row in rows]
    matrix = table([head.lower() for head in heads], cells) if rows else ""
    return f"<section><h2>Who hears whom</h2>{told}{matrix}</section>" if told or matrix else ""


def _slow(worker: Json) -> str:
    slow = worker.get("slow")
    return f' <span class="trouble slow">slow: {shown(slow["part"])}, costs {slow["cost"]:.0%}</span>' if slow else ""


def own_times(worker: Json) -> dict[str, float]:
    """Seconds of a step that are the rank's own, by part; empty where that is not measured."""
    own = worker.get("own") or {}
    found = {name: own.get(name, 0.0) for name in OWN}
    return found if any(found.values()) else {}


def _own(own: Mapping[str, float], longest: float) -> str:
    begin, bars = 0.0, []
    for name, seconds in own.items():
        width = 100 * seconds / longest
        title = f"<title>{name}: {formatting.duration(round(seconds * 1e9))}</title>"
        bars.append(f'<rect class="own-{name}" x="{begin:.2f}" width="{width:.2f}" height="10">{title}</rect>')
        begin += width
    total = formatting.duration(round(sum(own.values()) * 1e9)) if own else "?"
    return (
        '<div class="own"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(bars)}</svg><span>{total}</span></div>"
    )


# --- values and events


def _values(document: Json) -> str:
    rows = [[shown(name), shown(value)] for name, value in user_values(document)]
    return f"<section><h2>Metrics of the script</h2>{table(['name', 'value'], rows)}</section>" if rows else ""


def user_values(document: Json) -> Iterator[tuple[str, str]]:
    """Names and last values that the script has logged; of several ranks, those of the first that logs the name."""
    found = dict[str, tuple[int, Any, int]]()
    for node in document["nodes"]:
        for rank, logged in node.get("logged", {}).items():
            for name, value in logged["values"].items():
                if name not in found or int(rank) < found[name][0]:
                    found[name] = int(rank), value, logged["step"]
    for name, (rank, value, step) in sorted(found.items()):
        text = f"{value:.6g}" if isinstance(value, int | float) else str(value)
        yield name, f"{text} (step {step:,}, rank {rank})"


def _events(document: Json) -> str:
    several = len(document["nodes"]) > 1
    listed = "".join(
        f'<li class="{_kind(line.name)}"><time>{when(round(line.time * 1e9))[11:19]}</time>'
        f"<span>{shown(line.text)}{f' <em>{shown(line.host)}</em>' if several and line.host else ''}</span></li>"
        for line in event_text.lines(document["events"])
    )
    return (
        f'<section><h2>Newest events <small>UTC</small></h2><ol class="events" tabindex="0">{listed}</ol></section>'
        if listed
        else ""
    )


ALARMS = {
    "worker_died",
    "worker_failed",
    "hang",
    "hang_spared",
    "node_lost",
    "nodes_apart",
    "host_left_out",
    "replica_skipped",
    "persist_failed",
    "upload_failed",
    "gave_up",
    "straggler",
}


def _kind(name: str) -> str:
    return "alarm" if name in ALARMS else "plain"


def to_json(parts: Mapping[str, str], document: Json) -> bytes:
    """Return the answer to the script's request every two seconds."""
    state = document["job"]["state"]
    answer = {"parts": parts, "state": state, "mood": mood(state), "name": document["job"]["script"]}
    return json.dumps(answer).encode()
