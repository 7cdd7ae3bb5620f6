"""The text of `fastckpt top`: a running job in lines and tables, of the document that its agent serves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastckpt_run import formatting
from fastckpt_run.views import event_text
from fastckpt_run.views.live_view import LOSSES, OWN, TIERS, link_rows, links_of, own_times, unheard_lines, user_values
from fastckpt_run.views.report_text import when

Json = Mapping[str, Any]

EVENTS = 12
"""Events that are shown: the newest."""
WORKERS = 64
"""Workers that are shown, at most: those of the lowest ranks."""


@dataclass(frozen=True)
class TextTable:
    """A table: the names of its columns, those aligned to the right with a ``>``, and its rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def blocks(document: Json) -> Iterator[str | TextTable]:
    """Lines of text and tables, from the top to the bottom."""
    yield _head(document)
    yield _figures(document)
    yield from filter(None, (links_of(document)["awaited"], document["trouble"]))
    yield from _workers(document)
    yield from _links(document)
    yield from _losses(document)
    values = [[name, value] for name, value in user_values(document)]
    if values:
        yield TextTable(["METRIC", ">VALUE"], values)
    rows = [[when(round(one.time * 1e9))[11:19], one.text] for one in event_text.lines(document["events"])[:EVENTS]]
    if rows:
        yield TextTable(["UTC", "NEWEST EVENTS"], rows)


def _head(document: Json) -> str:
    job, nodes = document["job"], document["nodes"]
    where = f" on {job['host']}" if job["host"] and len(nodes) == 1 else f" on {formatting.count(len(nodes), 'node')}"
    age = f", for {_duration(document['at'] - job['begin'])}" if job["begin"] else ""
    times = f" in {job['launches']:,} launches" if job["launches"] > 1 else ""
    return f"{job['script'] or 'a job'} {job['state']}{where}{age}{times}"


def _figures(document: Json) -> str:
    steps = document["steps"]
    rate = steps["now"] if steps["now"] is not None else steps["per_second"]
    figures = [
        f"goodput {formatting.goodput(document['goodput'])}",
        "" if rate is None else f"{formatting.rate(rate)} steps per second",
        formatting.count(document["failures"], "failure"),
        f"{formatting.count(steps['repeated'], 'step')} repeated",
    ]
    return ", ".join(filter(None, figures))


def _duration(seconds: float | None) -> str:
    return formatting.duration(None if seconds is None else round(seconds * 1e9))


def _workers(document: Json) -> Iterator[str | TextTable]:
    nodes = document["nodes"]
    for node in nodes:
        if not node["answers"]:
            yield f"node {node['node']} does not answer"
    workers = [(node, worker) for node in nodes for worker in node.get("workers", ())]
    workers.sort(key=lambda each: each[1]["rank"])
    is_measured = any(own_times(worker) for _, worker in workers)
    if not workers:
        yield "no worker has been started yet"
        return
    heads = [">RANK", "NODE", "DOING", ">STEP", ">HEARTBEAT", *(f">{name.upper()}" for name in OWN if is_measured)]
    rows = []
    for node, worker in workers[:WORKERS]:
        beat = "none yet" if worker["silent"] is None else f"{_duration(worker['silent'])} ago"
        step = "" if worker["step"] is None else f"{worker['step']:,}"
        own = own_times(worker)
        times = [_duration(own[name]) if own else "?" for name in OWN] if is_measured else []
        row = [str(worker["rank"]), f"{node['node']} {node.get('host', '')}", _doing(worker), step, beat, *times]
        rows.append([*row, str(worker["pid"])])
    yield TextTable([*heads, ">PROCESS"], rows)
    if len(workers) > WORKERS:
        yield f"{len(workers) - WORKERS:,} more workers are not shown; --json has all"


def _links(document: Json) -> Iterator[str | TextTable]:
    heads, rows = link_rows(document)
    told = list(unheard_lines(document))
    yield from told
    if rows and told:
        yield TextTable(heads, rows)


def _doing(worker: Json) -> str:
    slow = worker.get("slow")
    return f"{worker['doing']}, slow: {slow['part']}, costs {slow['cost']:.0%}" if slow else str(worker["doing"])


def _losses(document: Json) -> Iterator[str | TextTable]:
    rows = []
    for one in document["loss"]:
        for name, (when_lost, _) in LOSSES.items():
            if (cost := one[name]) is not None:
                save = f"step {cost['save'][1]:,}" if cost["save"] else "nothing"
                more = "more than " if cost["at_least"] else ""
                lost, spent = formatting.count(cost["steps"], "step"), f"{more}{_duration(cost['seconds'])}"
                rows.append([when_lost, lost, spent, save, one["directory"]])
    if rows:
        yield TextTable(["WHAT IS LOST", ">STEPS", ">WORK", "RESUMED", "DIRECTORY"], rows)
    rows = []
    for node in document["nodes"]:
        for tiers in node.get("tiers", ()):
            held = [_tier(tiers[name]) if tiers[name] else "-" for name in TIERS]
            rows.append(
                [f"{node['node']}", *held, f"{tiers['saves']:,}", f"{tiers['skipped']:,}", tiers["trouble"] or "none"]
            )
    if rows:
        yield TextTable([">NODE", *(name.upper() for name in TIERS), ">SAVES", ">SKIPPED", "TROUBLE"], rows)


def _tier(tier: Json) -> str:
    if tier["step"] is None:
        return "nothing"
    return f"step {tier['step']:,}" + ("" if tier["age"] is None else f", {_duration(tier['age'])} old")
