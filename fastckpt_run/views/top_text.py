"""The text of `fastckpt top`: a running job in lines and tables, of the document that its agent serves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from fastckpt_run import formatting
from fastckpt_run.views import event_text
from fastckpt_run.views.live_view import (
    ALARMS,
    BAD,
    BUSY,
    GOOD,
    LOSSES,
    OWN,
    QUIET,
    TIERS,
    link_rows,
    links_of,
    mood,
    own_times,
    unheard_lines,
    user_values,
)
from fastckpt_run.views.report_text import when

Json = Mapping[str, Any]

EVENTS = 12
"""Events that are shown: the newest."""
GAP = "  "
"""Between two columns."""
WORKERS = 64
"""Workers that are shown, at most: those of the lowest ranks."""


class Toned(str):
    """A text with a tone, good, busy or bad, which has a colour in a terminal."""

    tone: str

    def __new__(cls, text: str, tone: str) -> Self:
        """Make one of a text."""
        found = super().__new__(cls, text)
        found.tone = tone
        return found


@dataclass(frozen=True)
class TextTable:
    """A table.

    Attributes:
        columns: Names; a ``>`` is before that of a column that is aligned to the right.
        rows: The cells of each row.
        optional: Names of columns that a narrow terminal leaves out, the first ones first.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    optional: Sequence[str] = ()

    @property
    def width(self) -> int:
        """Columns of a terminal that it takes."""
        widths = [max(map(len, cells)) for cells in zip(self._names, *self.rows, strict=True)]
        return sum(widths) + len(GAP) * (len(widths) - 1)

    @property
    def _names(self) -> list[str]:
        return [name.lstrip(">") for name in self.columns]

    def fitted(self, width: int) -> Self:
        """The table for a terminal of this width; its required columns may still be wider."""
        found = self
        for name in self.optional:
            if found.width <= width:
                break
            kept = [number for number, each in enumerate(found._names) if each != name]
            rows = [[row[number] for number in kept] for row in found.rows]
            found = replace(found, columns=[found.columns[number] for number in kept], rows=rows)
        return found


def blocks(document: Json, width: int = 0) -> Iterator[str | TextTable]:
    """Lines of text and tables, from the top to the bottom; 0 for the width of a pipe, where nothing is left out."""
    for block in _blocks(document, is_wide=not width):
        yield block.fitted(width) if width and isinstance(block, TextTable) else block


def _blocks(document: Json, *, is_wide: bool) -> Iterator[str | TextTable]:
    yield Toned(_head(document), mood(document["job"]["state"]))
    yield _figures(document)
    yield from (Toned(text, BAD) for text in (links_of(document)["awaited"], document["trouble"]) if text)
    yield from _workers(document, is_wide=is_wide)
    yield from _links(document)
    yield from _losses(document)
    values = [[name, value] for name, value in user_values(document)]
    if values:
        yield TextTable(["METRIC", ">VALUE"], values)
    shown = event_text.lines(document["events"])[:EVENTS]
    rows = [[when(round(one.time * 1e9))[11:19], Toned(one.text, BAD if one.name in ALARMS else "")] for one in shown]
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


def _workers(document: Json, *, is_wide: bool) -> Iterator[str | TextTable]:
    nodes = document["nodes"]
    yield from (Toned(f"node {node['node']} does not answer", BAD) for node in nodes if not node["answers"])
    workers = [(node, worker) for node in nodes for worker in node.get("workers", ())]
    workers.sort(key=lambda each: each[1]["rank"])
    is_measured = any(own_times(worker) for _, worker in workers)
    if not workers:
        yield "no worker has been started yet"
        return
    if not is_wide:
        shown = [worker for _, worker in workers[:WORKERS]]
        yield from (Toned(f"rank {each['rank']} is {slow}", BUSY) for each in shown if (slow := _slow(each)))
    heads = [">RANK", "NODE", "DOING", ">STEP", ">HEARTBEAT", *(f">{name.upper()}" for name in OWN if is_measured)]
    rows = []
    for node, worker in workers[:WORKERS]:
        step = "" if worker["step"] is None else f"{worker['step']:,}"
        own = own_times(worker)
        times = [_duration(own[name]) if own else "?" for name in OWN] if is_measured else []
        doing = _doing(worker, is_wide=is_wide)
        row = [str(worker["rank"]), f"{node['node']} {node.get('host', '')}", doing, step, _beat(worker), *times]
        rows.append([*row, str(worker["pid"])])
    optional = ["PROCESS", *(["NODE"] if len(nodes) == 1 else []), *(name.upper() for name in reversed(OWN))]
    yield TextTable([*heads, ">PROCESS"], rows, optional)
    if len(workers) > WORKERS:
        yield f"{len(workers) - WORKERS:,} more workers are not shown; --json has all"


def _beat(worker: Json) -> str:
    silent = worker["silent"]
    if silent is None:
        return "none yet"
    is_quiet = silent > QUIET and worker["doing"] == "takes steps"
    return Toned(f"{_duration(silent)} ago", BAD if is_quiet else "")


def _doing(worker: Json, *, is_wide: bool) -> str:
    doing, slow = str(worker["doing"]), _slow(worker)
    if slow and is_wide:
        return f"{doing}, {slow}"
    return Toned(doing, {"takes steps": BUSY if slow else GOOD, "has ended": BAD}.get(doing, ""))


def _slow(worker: Json) -> str:
    slow = worker.get("slow")
    return f"slow: {slow['part']}, costs {slow['cost']:.0%}" if slow else ""


def _links(document: Json) -> Iterator[str | TextTable]:
    heads, rows = link_rows(document)
    told = [Toned(line, BAD) for line in unheard_lines(document)]
    yield from told
    if rows and told:
        yield TextTable(heads, rows)


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
        optional = ["DIRECTORY"] if len(document["loss"]) == 1 else []
        yield TextTable(["WHAT IS LOST", ">STEPS", ">WORK", "RESUMED", "DIRECTORY"], rows, optional)
    rows, nodes = [], document["nodes"]
    optional = ["NODE"] if len(nodes) == 1 else []
    for node in nodes:
        for tiers in node.get("tiers", ()):
            held = [_tier(tiers[name]) if tiers[name] else "-" for name in TIERS]
            trouble = Toned(tiers["trouble"], BAD) if tiers["trouble"] else "none"
            rows.append([f"{node['node']}", *held, f"{tiers['saves']:,}", f"{tiers['skipped']:,}", trouble])
    optional += ["TROUBLE"] if all(row[-1] == "none" for row in rows) else []
    optional += ["REMOTE"] if all(row[1 + TIERS.index("remote")] == "-" for row in rows) else []
    if rows:
        heads = [">NODE", *(name.upper() for name in TIERS), ">SAVES", ">SKIPPED", "TROUBLE"]
        yield TextTable(heads, rows, [*optional, "SKIPPED", "SAVES"])


def _tier(tier: Json) -> str:
    if tier["step"] is None:
        return "nothing"
    return f"step {tier['step']:,}" + ("" if tier["age"] is None else f", {_duration(tier['age'])} old")
