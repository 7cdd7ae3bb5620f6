"""Events in words, for people who watch a job: the newest ones, those of several ranks in one line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastckpt._core.byte_sizes import decimal
from fastckpt._core.report.events import Event, nanoseconds, text, whole
from fastckpt_run import formatting
from fastckpt_run.failures.deaths import describe

_LONGEST = 240
"""Characters of a line; the page and the event log have all."""
_COMMON = ("event", "time", "monotonic", "pid", "host", "directory")


@dataclass(frozen=True)
class EventLine:
    """An event in words.

    Attributes:
        time: Seconds since the epoch.
        name: Its name; also its class in a style sheet.
        text: The words.
        host: Host of the event; empty if it is not known.
    """

    time: float
    name: str
    text: str
    host: str


def lines(events: Sequence[Event]) -> list[EventLine]:
    """Events in words, in their order; neighbours that differ in their rank alone are one line."""
    found, last = list[EventLine](), None
    ranks = list[int]()
    for event in [*events, None]:
        kind = _kind(event) if event is not None else None
        if last is not None and kind is not None and kind == _kind(last):
            ranks.append(whole(event or {}, "rank", -1))
            continue
        if last is not None:
            found.append(_line(last, ranks))
        last, ranks = event, [whole(event, "rank", -1)] if event is not None else []
    return found


def _kind(event: Event) -> tuple[object, ...] | None:
    name = event["event"]
    if name not in _OF_RANKS:
        return None
    return name, text(event, "host"), *(str(event.get(field)) for field in ("step", "tier", "restart_count"))


def _line(event: Event, ranks: list[int]) -> EventLine:
    name = event["event"]
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_ranges(ranks)}"
    words = _OF_RANKS[name](event, who) if name in _OF_RANKS else _WORDS.get(name, _fields)(event)
    return EventLine(event["time"], name, shortened(words), text(event, "host"))


def shortened(words: str) -> str:
    """A line that is not too long."""
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."


def _ranges(ranks: list[int]) -> str:
    """Numbers as ranges, such as ``0-3, 5``."""
    found = list[list[int]]()
    for rank in sorted(set(ranks)):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)


def _fields(event: Event) -> str:
    """Any event: its name and fields."""
    fields = ", ".join(f"{name} {value}" for name, value in event.items() if name not in _COMMON)
    return f"{event['event'].replace('_', ' ')}: {fields}" if fields else event["event"].replace("_", " ")


def _seconds(event: Event, name: str = "seconds") -> str:
    return formatting.duration(nanoseconds(event, name))


def _step(event: Event) -> str:
    return f"step {whole(event, 'step', -1):,}"


def _earlier(event: Event) -> str:
    count = whole(event, "earlier", 0)
    return f"; {count:,} more before it" if count > 0 else ""


def _durable(event: Event) -> str:
    size = decimal(max(0, whole(event, "bytes", 0)))
    return f"{_step(event)} is on storage: {size} in {_seconds(event)}{_earlier(event)}"


def _node_check(event: Event) -> str:
    checks = event.get("checks")
    bad = [each for each in checks if isinstance(each, dict)] if isinstance(checks, list) else []
    why = [f"{each.get('name')}: {each.get('message')}" for each in bad if each.get("verdict") != "ok"]
    occasions = {"start": "before it joins", "round": "with the others", "failure": "after a failure"}
    when = occasions.get(text(event, "occasion"), "at an unknown time")
    found = f"node check {when}, {_seconds(event)}: {text(event, 'verdict')}"
    return "; ".join([found, *why, *(f"{kind}: {_hosts(event, kind)}" for kind in ("bad", "slow") if event.get(kind))])


def _hosts(event: Event, name: str) -> str:
    hosts = event.get(name)
    found = [each for each in hosts if isinstance(each, dict)] if isinstance(hosts, list) else []
    return ", ".join(f"node {each.get('node')} on {each.get('host')}" for each in found)


def _node_lost(event: Event) -> str:
    nodes = event.get("nodes")
    return f"lost: node {', '.join(map(str, nodes)) if isinstance(nodes, list) else '?'}: {text(event, 'reason')}"


def _apart(event: Event) -> str:
    hosts = event.get("hosts")
    names = ", ".join(map(str, hosts)) if isinstance(hosts, list) else "?"
    return (
        f"{text(event, 'host')} hears {names} again"
        if event.get("undo")
        else f"{text(event, 'host')} does not hear {names}"
    )


def _left_out(event: Event) -> str:
    causes = event.get("causes")
    if causes == ["drained"]:
        return f"{text(event, 'host')} is drained: the job goes on without it"
    why = "; ".join(map(str, causes)) if isinstance(causes, list) else "?"
    if why.startswith("does not reach"):
        return f"{text(event, 'host')} {why}: the job goes on without it"
    return f"{text(event, 'host')} is left out while a spare waits, since it failed again: {why}"


def _died(event: Event) -> str:
    code = event.get("exitcode")
    return f"rank {whole(event, 'rank', -1)} died: {describe(code if type(code) is int else None)}"


def _failed(event: Event, who: str) -> str:
    why = text(event, "exception") or "no exception is known"
    return f"{who} failed: {why}" + (f", in {frame}" if (frame := text(event, "frame")) else "")


def _hang(event: Event) -> str:
    return f"hang, after {_seconds(event, 'silent')} of silence: {text(event, 'reason')}"


def _straggler(event: Event) -> str:
    cost = event.get("cost")
    dear = f": the job is {cost:.0%} slower" if isinstance(cost, int | float) else ""
    where = f" on {host}" if (host := text(event, "host")) else ""
    if event.get("slow") is False:
        return f"rank {whole(event, 'rank', -1)}{where} is not slow any more"
    return f"rank {whole(event, 'rank', -1)}{where} is slow, {text(event, 'part')}{dear}"


_OF_RANKS: dict[str, Callable[[Event, str], str]] = {
    "worker_joined": lambda event, who: f"{who} joined, with a checkpointer",
    "resumed": lambda event, who: f"{who} resumed {_step(event)} from {text(event, 'tier')} in {_seconds(event)}",
    "started_fresh": lambda event, who: f"{who} started afresh: there was nothing to resume",
    "first_step": lambda event, who: f"{who} completed a first step",
    "worker_failed": _failed,
}
"""Events that each rank has, with words that follow its name."""
_WORDS: dict[str, Callable[[Event], str]] = {
    "job_started": lambda event: f"launch of {text(event, 'script') or 'a command'}",
    "rendezvous": lambda event: (
        f"{formatting.count(whole(event, 'nodes', 1), 'node')} met, with "
        f"{formatting.count(whole(event, 'world_size', 1), 'rank')}, in {_seconds(event)}"
    ),
    "workers_started": lambda event: f"workers started: processes {_pids(event)}",
    "workers_stopped": lambda event: "all workers are stopped",
    "workers_finished": lambda event: "all workers have finished",
    "worker_died": _died,
    "hang": _hang,
    "hang_spared": lambda event: f"{_hang(event)}; {text(event, 'spared')}",
    "restarted": lambda event: text(event, "text"),
    "gave_up": lambda event: text(event, "text") or f"no restart: {text(event, 'why')}",
    "skipped": lambda event: f"{_step(event)} was not saved: {text(event, 'reason')}{_earlier(event)}",
    "persisted": _durable,
    "flush_started": lambda event: f"flush of {_step(event)} begins",
    "flush_done": _durable,
    "persist_failed": lambda event: f"{_step(event)} could not be persisted: {text(event, 'error')}",
    "uploaded": lambda event: f"{_step(event)} is in {text(event, 'remote')}, in {_seconds(event)}{_earlier(event)}",
    "upload_failed": lambda event: f"an upload failed: {text(event, 'error')}",
    "preload_ready": lambda event: f"the template has imported all, in {_seconds(event)}",
    "stop_asked": lambda event: "a stop with a flush was asked for on the live page",
    "straggler": _straggler,
    "node_check": _node_check,
    "node_lost": _node_lost,
    "waits_as_spare": lambda event: f"{text(event, 'host')} waits as a spare: the job has all its nodes",
    "host_left_out": _left_out,
    "nodes_apart": _apart,
    "replicated": lambda event: f"{_step(event)} is copied to {text(event, 'to')}, in {_seconds(event)}",
    "prefetched": lambda event: f"{_step(event)} of {text(event, 'host')} is prefetched, in {_seconds(event)}",
    "replica_skipped": lambda event: f"{_step(event)} is not copied to other hosts: {text(event, 'reason')}",
    "bad_checkpoint": lambda event: (
        f"{_step(event)} cannot be loaded from {text(event, 'tier')}: {text(event, 'reason')}"
    ),
    "hang_elsewhere": lambda event: f"the agent on {text(event, 'host')} has found that the job hangs",
    "restarts_given_back": lambda event: f"restarts are returned: {whole(event, 'restarts_left', 0):,} left",
    "preload_fallback": lambda event: f"workers are started without the template: {text(event, 'why')}",
    "superseded": lambda event: f"another job has taken over {text(event, 'place')}: {text(event, 'holder')}",
    "job_ended": lambda event: f"the launch has ended: {text(event, 'outcome')}",
}
"""Other events; missing ones are shown with their fields."""


def _pids(event: Event) -> str:
    pids = event.get("pids")
    return ", ".join(map(str, pids.values())) if isinstance(pids, dict) else "?"
