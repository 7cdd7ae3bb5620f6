"""The view of a whole job now, made at each look: its nodes, its report, its newest events."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastckpt._core.policy.stragglers import SlowRank
from fastckpt._core.report.events import Event, Log, text, whole
from fastckpt._core.report.launches import ACCOUNTED
from fastckpt._core.report.report import Report, incidents
from fastckpt._core.report.report import report as report_on
from fastckpt._core.storage.store import is_url
from fastckpt_run.rendezvous.node_links import NodeLinks
from fastckpt_run.watch.growing_logs import LogReader
from fastckpt_run.watch.node_channel import NodeChannel
from fastckpt_run.watch.node_status import STATUS

Json = dict[str, Any]

FRESH = 1.0
"""Seconds for which answers of the nodes, and reports, are not made again."""
ANSWER = 3.0
"""Seconds that a node has to answer."""
READ = 2.0
"""Seconds that a look waits for storage; later ones see later events."""
SHARE = 0.05
"""Share of time in which reports are made, at most: while somebody looks, one of a job with long logs comes seldom."""
FORGOTTEN = 60.0
"""Seconds after the last look until the memory of logs is given back."""
GROWS = 10.0
"""Seconds since the last event of a log after which it counts as one that does not grow any more."""
NEWEST = 60
"""Events that are shown."""
_QUIET = frozenset(
    {"progress", "saved", "metrics", "logged", "rank_times", "frequency", "node_messages", "offload_measured", "report"}
)
"""Events of every second, that no reader wants one by one, and the summary of the others at the end."""
_ROUTINE = frozenset({"persisted", "uploaded", "skipped"})
"""Events that come as often as saves: of those in a row the newest is shown, or nothing else would be."""


@dataclass
class JobView:
    """Result of a look at the job.

    Attributes:
        at: Time at which the nodes answered, in seconds since the epoch.
        nodes: The state of each node, by rank; None of one that does not answer.
        found: The report.
        reported: Time of that report, in seconds since the epoch.
        events: The newest events, newest first, with the host that each was on.
        turn: The event that the state of the job follows from.
        directory: The one with the event logs that were read; empty for none.
        trouble: Reason why they are not read as they are; empty if they are.
        unheard: Pairs of nodes, by rank: the first receives nothing from the second, which answers others.
        awaited: Description of the nodes that the next round waits for; empty while workers run.
    """

    at: float
    nodes: dict[int, Json | None]
    found: Report
    reported: float
    events: list[Event]
    turn: str = ""
    directory: str = ""
    trouble: str = ""
    unheard: Sequence[tuple[int, int]] = ()
    awaited: str = ""

    @property
    def own(self) -> Json:
        """The state of the first node, which is this one."""
        return self.nodes.get(0) or {"host": "", "workers": [], "tiers": []}

    @property
    def state(self) -> str:
        """The state of the job, in one or two words."""
        workers = [worker for node in self.nodes.values() if node for worker in node["workers"]]
        if self.turn == "workers_started":
            if workers and all(worker["doing"] == "has ended" for worker in workers):
                return "ends"
            return "trains" if any(worker["steps"] for worker in workers) else "starts"
        return _STATES.get(self.turn, "waits for nodes")


_STATES = {
    "rendezvous": "starts",
    "worker_died": "stops after a failure",
    "hang": "stops after a hang",
    "workers_stopped": "restarts",
    "stop_asked": "stops with a flush",
    "workers_finished": "ends",
    "job_ended": "ends",
}
"""The state of a job after the last of these events on the first node, but for `workers_started`."""
_TURNS = {f'{{"event": "{name}"'.encode(): name for name in (*_STATES, "job_started", "workers_started")}


class Turns:
    """The last turn of a launch among its lines, which only ever grow; each is looked at once."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines, self._looked, self._last = lines, 0, ""

    def last(self) -> str:
        """The name of the event."""
        for line in self._lines[self._looked :]:
            self._last = _TURNS.get(line[: line.find(b",")], self._last)
            self._looked += 1
        return self._last


class JobViews:
    """Makes views of the job; called in threads of requests, of which one at a time makes a new one.

    Args:
        channel: Asks the agents of other nodes.
        lines: Events of this launch so far.
        directories: The checkpoint directories of this node.
        slow: The slow ranks of now, by rank.
        links: Reports of nodes on the links between them; None if there are none.
    """

    def __init__(
        self,
        channel: NodeChannel,
        lines: Sequence[bytes],
        directories: Callable[[], Sequence[str]],
        slow: Callable[[], Mapping[int, SlowRank]] = dict,
        links: NodeLinks | None = None,
    ) -> None:
        self._channel, self._directories, self._slow, self._links = channel, directories, slow, links
        self._unheard: Sequence[tuple[int, int]] = ()
        self._awaited = ""
        self._logs, self._turns = LogReader(lines), Turns(lines)
        self._nodes: dict[int, Json | None] = {}
        self._nodes_at = self._nodes_wall = 0.0
        self._report = report_on([])
        self._newest: list[Event] = []
        self._report_at = self._report_wall = self._pause = 0.0
        self._directory = ""
        self._looked = 0.0
        self._asking, self._reading = threading.Lock(), threading.Lock()

    def look(self) -> JobView:
        """The job now, or as it was a moment ago."""
        self._looked = time.monotonic()
        with self._asking:
            if time.monotonic() - self._nodes_at > FRESH:
                self._ask()
            nodes, at, unheard, awaited = self._nodes, self._nodes_wall, self._unheard, self._awaited
        with self._reading:
            if time.monotonic() - self._report_at > max(FRESH, self._pause):
                self._read()
            return JobView(
                at,
                nodes,
                self._report,
                self._report_wall,
                self._newest,
                self._turns.last(),
                self._directory,
                self._trouble(),
                unheard,
                awaited,
            )

    def rest(self) -> None:
        """Give back memory if nobody looks any more; called now and then."""
        if self._looked and time.monotonic() - self._looked > FORGOTTEN and self._reading.acquire(blocking=False):
            try:
                self._logs.forget()
                self._report, self._newest = report_on([]), []
                self._report_at = self._pause = self._looked = 0.0
            finally:
                self._reading.release()

    def _ask(self) -> None:
        answers = self._channel.ask_all(STATUS, {}, ANSWER)
        self._nodes = {rank: answers.get(rank) for rank in range(self._channel.nodes)}
        for node in answers.values():
            for worker in node["workers"]:
                found = self._slow().get(worker["rank"])
                worker["slow"] = {"part": found.part, "cost": found.cost} if found else None
        if self._links is not None:
            self._unheard, self._awaited = self._links.unheard(), self._links.awaited()
        self._nodes_at, self._nodes_wall = time.monotonic(), time.time()

    def _read(self) -> None:
        self._directory = next((name for name in self._directories() if not is_url(name)), "")
        logs = self._logs.read(self._directory, READ)
        begin = time.thread_time()
        events = [event for log in logs for event in log.events]
        self._report = report_on([Log(log.path, settled(log.events, time.time()), log.unreadable) for log in logs])
        self._newest = newest(events)
        took = time.thread_time() - begin
        # One look in so many: a report's time is taken from the workers' cores, and from this agent's threads.
        self._report_at, self._report_wall, self._pause = time.monotonic(), time.time(), took / SHARE

    def _trouble(self) -> str:
        if self._logs.trouble:
            return f"the event logs of {self._directory} cannot be read: {self._logs.trouble}"
        if self._logs.asked and time.monotonic() - self._logs.asked > READ:
            silent = time.monotonic() - self._logs.asked
            return f"{self._directory} does not answer since {silent:.0f} s: what its event logs say is older"
        return ""


def settled(events: list[Event], now: float) -> list[Event]:
    """The events of a log up to the last by which time is accounted for, if it still grows.

    Later events belong to no cause yet: a report of each second would show a different part as unexplained.
    """
    last = len(events)
    while last and now - events[-1]["time"] < GROWS and events[last - 1]["event"] not in ACCOUNTED:
        last -= 1
    return events[:last]


def newest(events: Sequence[Event]) -> list[Event]:
    """The newest events that matter to a reader, newest first, each with the host that it was on."""
    hosts, shown = dict[int, str](), list[Event]()
    for event in events:
        if event["event"] == "job_started":
            hosts[event["pid"]] = text(event, "host")
        if event["event"] not in _QUIET:
            shown.append({**event, "host": text(event, "host") or hosts.get(event["pid"], "")})
    return _joined(sorted(shown, key=lambda event: event["time"], reverse=True))[:NEWEST]


def _joined(events: Sequence[Event]) -> list[Event]:
    """Events, newest first; of a row of routine ones the newest of each kind, with the number of ``earlier`` steps."""
    found, row = list[Event](), dict[tuple[str, str], tuple[Json, set[int]]]()
    for event in events:
        if event["event"] not in _ROUTINE:
            row.clear()
            found.append(event)
            continue
        newer, steps = row.setdefault((event["event"], text(event, "reason")), ({**event}, set()))
        if not steps:
            found.append(newer)
        steps.add(whole(event, "step", -1))  # each node reports it
        newer["earlier"] = len(steps) - 1
    return found


def as_document(view: JobView) -> Json:
    """A view as JSON, with times in seconds; docs/reference/cli.md has the keys."""
    found, launch = view.found, None
    for chain in view.found.nodes.values():
        launch = launch or chain[-1]
    return {
        "at": view.at,
        "job": {
            "state": view.state,
            "run_id": launch.launch.run_id if launch else "",
            "script": launch.launch.script if launch else "",
            "host": launch.launch.host if launch else "",
            "begin": min(chain[0].begin for chain in found.nodes.values()) / 1e9 if launch else None,
            "launches": max((len(chain) for chain in found.nodes.values()), default=0),
        },
        "goodput": found.goodput,
        "total": found.total / 1e9,
        "time": {cause: spent / 1e9 for cause, spent in found.lost.items()},
        "steps": {
            "new": found.steps.new,
            "repeated": found.steps.repeated,
            "per_second": found.steps_per_second,
            "now": steps_per_second(found),
        },
        "failures": len(incidents(found.failures)),
        "nodes": [{"node": rank, "answers": node is not None, **(node or {})} for rank, node in view.nodes.items()],
        "links": {"unheard": [list(pair) for pair in view.unheard], "awaited": view.awaited},
        "loss": losses(view),
        "events": [dict(event) for event in view.events],
        "directory": view.directory,
        "trouble": view.trouble,
        "reported": view.reported,
    }


LATELY = 10.0
"""Seconds over which the rate of steps now is measured, at least."""


def steps_per_second(found: Report) -> float | None:
    """The rate of steps of the furthest worker of the first node over the last seconds; None if it takes none."""
    samples = found.nodes[min(found.nodes)][-1].launch.rounds[-1].samples if found.nodes else []
    if not samples:
        return None
    last = samples[-1]
    before = next((one for one in reversed(samples) if last.beat - one.beat >= LATELY * 1e9), samples[0])
    took = last.beat - before.beat
    reached = found.steps.unit.reached
    return (reached(last) - reached(before)) * 1e9 / took if took > 0 else None


def losses(view: JobView) -> list[Json]:
    """The cost of a loss now in each directory: of the node that would lose most, as each node knows its own memory."""
    found = dict[str, Json]()
    for rank, node in view.nodes.items():
        for tiers in node["tiers"] if node else ():
            known = found.setdefault(tiers["directory"], {"directory": tiers["directory"]})
            for name, loss in tiers["loss"].items():
                if loss and (known.get(name) is None or loss["steps"] > known[name]["steps"]):
                    known[name] = {**loss, "of_node": rank}
    return [{"worker": None, "node": None, "storage": None, **one} for one in found.values()]
