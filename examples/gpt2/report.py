"""Records of a run with a failure: times of all events, and whether the failure changed the training."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class IncompleteRecordError(Exception):
    """The record lacks something that the report must tell."""


def read_lines(path: Path) -> list[Event]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Failure:
    """A worker's death and the way back.

    Attributes:
        local_rank: The worker that was killed.
        pid: Its process.
        last_step: The last step that any worker had done before.
        resumed_step: The step at which all workers resumed.
        tier: Tier in which they found it.
        moments: Seconds since the kill, and what happened then.
        back: Seconds from the kill to the first step that was done after it.
    """

    local_rank: int
    pid: int
    last_step: int
    resumed_step: int
    tier: str
    moments: list[tuple[float, str]]
    back: float

    @property
    def repeated(self) -> range:
        """Steps that were done twice."""
        return range(self.resumed_step + 1, self.last_step + 1)

    @classmethod
    def from_events(cls, events: Sequence[Event]) -> "Failure":
        """Find the kill in a log of events; raises IncompleteRecordError naming the event that is missing."""
        events = sorted(events, key=lambda event: event["time"])
        killed = _first(events, "killed")
        after = [event for event in events if event["time"] >= killed["time"]]
        restart = _first(after, "workers_started")
        again = [event for event in after if event["time"] >= restart["time"]]
        resumed = _resumed(again, workers=len(restart["pids"]))
        step = _first(again, "step")
        found = [_first(after, name) for name in _TOLD if name not in (*_OF_ALL, "step")] + [resumed, step]
        found += [event for event in again if event["event"] == "worker_joined"][-1:]
        done = [e["step"] for e in events if e["event"] == "step" and e["time"] < restart["time"]]
        return cls(
            local_rank=killed["local_rank"],
            pid=killed["victim"],
            last_step=max(done, default=0),
            resumed_step=resumed["step"],
            tier=resumed["tier"],
            moments=sorted((e["time"] - killed["time"], _tell(e)) for e in found),
            back=step["time"] - killed["time"],
        )


_OF_ALL = ("worker_joined", "resumed")
"""Values that each worker prints of itself; the last of them counts."""
_TOLD: dict[str, Callable[[Event], str]] = {
    "killed": lambda e: f"worker {e['local_rank']} (pid {e['victim']}) is killed by SIGKILL",
    "worker_died": lambda e: f"the agent notices that worker {e['local_rank']} has died",
    "workers_stopped": lambda _: "all workers are stopped",
    "flush_started": lambda e: f"flush of step {e['step']} from memory to storage begins",
    "flush_done": lambda e: f"flush is done: step {e['step']}, {e['bytes'] / 1e6:.1f} MB",
    "workers_started": lambda e: f"workers are started again, as pids {sorted(e['pids'].values())}",
    "worker_joined": lambda _: "all workers are set up: the script's own imports, data and model came before",
    "resumed": lambda e: f"all workers have resumed at step {e['step']} from {e['tier']}",
    "step": lambda e: f"first step after the failure is done: step {e['step']}",
}


def _tell(event: Event) -> str:
    try:
        return _TOLD[event["event"]](event)
    except KeyError as error:
        raise IncompleteRecordError(f"the event {event['event']!r} has no {error}") from error


def _first(events: Iterable[Event], name: str) -> Event:
    for event in events:
        if event["event"] == name:
            return event
    raise IncompleteRecordError(f"the event log has no {name!r} where the report needs it")


def _resumed(events: Iterable[Event], workers: int) -> Event:
    resumed = [event for event in events if event["event"] == "resumed"]
    if len(resumed) < workers:
        raise IncompleteRecordError(f"{len(resumed)} of {workers} workers told that they resumed")
    if len({(event["step"], event["tier"]) for event in resumed}) != 1:
        raise IncompleteRecordError(f"the workers resumed differently: {resumed}")
    return resumed[-1]


@dataclass(frozen=True)
class Comparison:
    """Comparison of a run with the uninterrupted one, step by step."""

    equal: int
    steps: int
    first_unequal: int | None

    @classmethod
    def of(cls, reference: Sequence[Event], records: Sequence[Event]) -> "Comparison":
        """A step is equal when all that was recorded of it, each time it was done, has the very same bits."""
        expected = {record["step"]: record for record in reference}
        found: dict[int, list[Event]] = defaultdict(list)
        for record in records:
            found[record["step"]].append(record)
        steps = sorted(expected.keys() | found.keys())
        unequal = [s for s in steps if not found[s] or any(r != expected.get(s) for r in found[s])]
        return cls(len(steps) - len(unequal), len(steps), unequal[0] if unequal else None)

    def __str__(self) -> str:
        if self.first_unequal is None:
            return f"equal the uninterrupted run: {self.equal} of {self.steps} steps bit for bit"
        unequal = f"{self.steps - self.equal} of {self.steps} steps, first step {self.first_unequal}"
        return f"DIFFER from the uninterrupted run: {unequal}"


def describe(failure: Failure, losses: Comparison, weights_equal: bool) -> str:
    """The report for a person to read."""
    lines = ["seconds since the kill"]
    lines += [f"  {seconds:7.3f}  {text}" for seconds, text in failure.moments]
    repeated = ", ".join(map(str, failure.repeated)) or "none"
    lines += [
        "",
        f"steps repeated  {repeated}",
        f"losses          {losses}",
        f"final weights   {'equal bit for bit' if weights_equal else 'DIFFER'}",
    ]
    return "\n".join(lines)
