"""One launch on one node, as its events tell it: rounds of workers, and when each came how far."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fastckpt._core.report.events import Event, nanoseconds, objects, text, whole
from fastckpt._core.report.failure_causes import FailureCause

_SECOND = 1_000_000_000


@dataclass(frozen=True)
class Load:
    """A rank's state was there: when, after how long, from which step and tier (-1, empty: there was none)."""

    at: int
    seconds: int
    step: int = -1
    tier: str = ""


@dataclass(frozen=True)
class Failure(FailureCause):
    """What ended a round: a rank that ``died`` or ``hung``; ``silent`` is how long before it was noticed."""

    at: int
    kind: str
    rank: int
    exitcode: int | None = None
    silent: int = 0


@dataclass(frozen=True)
class Sample:
    """How far the furthest worker of a node was.

    Attributes:
        at: When it was looked at.
        beat: When a worker said something last.
        steps: Steps completed since the worker started.
        step: The newest step that a save or load named; -1 for none.
        named: How many steps were completed when it was named.
        loaded: The step that it resumed from; -1 for none.
        stalled: Time spent in saves since the worker started, of the rank that spent most.
    """

    at: int
    beat: int
    steps: int
    step: int
    named: int
    loaded: int
    stalled: int


@dataclass
class LaunchRound:
    """One generation of workers. Instants are nanoseconds of the agent's monotonic clock; None: it did not come to it.

    Attributes:
        begin: When the agent began to look for the other nodes.
        met: When it had found them.
        started: When the worker processes were there.
        pids: The worker processes, by local rank.
        joined: When each local rank had a checkpointer.
        imported: When each had imported what it needs.
        loads: The first load of each local rank.
        first: When each had completed a step.
        failure: The first failure on this node.
        stopped: When all were dead and reaped.
        finished: When all had ended well.
    """

    begin: int
    met: int | None = None
    started: int | None = None
    pids: dict[int, int] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    imported: dict[int, int] = field(default_factory=dict)
    loads: dict[int, Load] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    failure: Failure | None = None
    stopped: int | None = None
    finished: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether its workers have ended."""
        return self.stopped is not None or self.finished is not None


@dataclass
class Launch:
    """One agent's life.

    Attributes:
        begin: Its first event, in nanoseconds of its monotonic clock; ``end`` its last one.
        wall: The wall clock at its first event, in nanoseconds since the epoch.
        node: Its rank when nodes first met.
        outcome: ``succeeded``, ``failed``, ``stopped``; empty while it runs, and for ever if it was killed.
        events: All of them.
    """

    begin: int
    end: int
    wall: int
    host: str = ""
    boot: str = ""
    pid: int = 0
    node: int = 0
    run_id: str = ""
    script: str = ""
    outcome: str = ""
    rounds: list[LaunchRound] = field(default_factory=list)
    events: Sequence[Event] = ()


def weights(logs: Iterable[Sequence[Event]]) -> dict[str, tuple[bool, int]]:
    """Whether each checkpoint directory is ever loaded from, and how often at most one agent's workers saved to it.

    The greater one tells how far training is: others may have numbers of steps of their own, or none for long.
    """
    found = dict[str, tuple[bool, int]]()
    for event in (event for events in logs for event in events if event["event"] in _OF_DIRECTORY):
        loaded, saves = found.get(text(event, "directory"), (False, 0))
        loaded |= event["event"] in ("resumed", "started_fresh")
        found[text(event, "directory")] = loaded, max(saves, whole(event, "saves", 0))
    return found


_OF_DIRECTORY = ("worker_joined", "resumed", "started_fresh", "progress")


def launch_of(events: Sequence[Event], weights: Mapping[str, tuple[bool, int]]) -> Launch:
    """What the events of one agent, at least one of them, in the order of its clock, tell.

    Of several checkpoint directories, the one of the greatest weight counts.
    """
    first, last = events[0], events[-1]
    launch = Launch(_at(first), _at(last), round(first["time"] * 1e9), pid=first["pid"], events=events)
    launch.rounds.append(LaunchRound(launch.begin))
    there = {text(event, "directory") for event in events if event["event"] in _OF_DIRECTORY}
    directory = max(there, key=lambda name: (weights[name], name), default="")
    for event in events:
        tell = _TOLD.get(event["event"])
        if tell is not None and (event["event"] not in _OF_DIRECTORY or text(event, "directory") == directory):
            tell(launch, event)
    return launch


def _at(event: Event) -> int:
    at: float = event["monotonic"]
    return round(at * 1e9)


def _job_started(launch: Launch, event: Event) -> None:
    launch.host, launch.boot = text(event, "host"), text(event, "boot")
    launch.run_id, launch.script = text(event, "run_id"), text(event, "script")


def _job_ended(launch: Launch, event: Event) -> None:
    launch.outcome = text(event, "outcome")


def _round_to_start(launch: Launch, at: int, *, has_begun: bool) -> LaunchRound:
    """The round that is to start its workers: a new one if what ended the last one is not in the log."""
    last = launch.rounds[-1]
    if last.is_over or has_begun:
        launch.rounds.append(LaunchRound(last.stopped or at))
    return launch.rounds[-1]


def _rendezvous(launch: Launch, event: Event) -> None:
    last = launch.rounds[-1]
    one = _round_to_start(launch, _at(event), has_begun=last.met is not None)
    one.met = _at(event)
    launch.node = whole(event, "node", 0) if len(launch.rounds) == 1 else launch.node


def _workers_started(launch: Launch, event: Event) -> None:
    one = _round_to_start(launch, _at(event), has_begun=launch.rounds[-1].started is not None)
    one.started = _at(event)
    pids = event.get("pids")
    for rank, pid in pids.items() if isinstance(pids, dict) else ():
        if rank.isascii() and rank.isdigit() and len(rank) < 8 and type(pid) is int:
            one.pids[int(rank)] = pid


def _worker_joined(launch: Launch, event: Event) -> None:
    one, rank = launch.rounds[-1], whole(event, "local_rank", -1)
    one.joined.setdefault(rank, _at(event))
    one.imported.setdefault(rank, min(nanoseconds(event, "imported") or _at(event), _at(event)))


def _loaded(launch: Launch, event: Event) -> None:
    seconds = max(0, nanoseconds(event, "seconds") or 0)
    load = Load(_at(event), seconds, whole(event, "step", -1), text(event, "tier"))
    launch.rounds[-1].loads.setdefault(whole(event, "local_rank", -1), load)


def _first_step(launch: Launch, event: Event) -> None:
    one, at = launch.rounds[-1], nanoseconds(event, "at")
    if at is not None and one.begin <= at <= _at(event):
        one.first.setdefault(whole(event, "local_rank", -1), at)


def _progress(launch: Launch, event: Event) -> None:
    one = launch.rounds[-1]
    said = [rank for rank in objects(event, "ranks") if _is_of(rank, one)]
    if one.started is None or not said:
        return
    at, far = _at(event), max(said, key=lambda rank: whole(rank, "steps", 0))
    steps = max(0, whole(far, "steps", 0))
    sample = Sample(
        at=at,
        beat=max(min(nanoseconds(rank, "beat") or 0, at) for rank in said),
        steps=steps,
        step=max(-1, whole(far, "step", -1)),
        named=min(steps, max(0, whole(far, "named", 0))),
        loaded=max(-1, whole(far, "loaded", -1)),
        stalled=max(0, *(nanoseconds(rank, "stalled") or 0 for rank in said)),
    )
    one.samples.append(sample)


def _is_of(rank: Event, one: LaunchRound) -> bool:
    """Whether a worker of this round said it: until it says something, what the one before it said stands there."""
    return one.started is not None and (nanoseconds(rank, "beat") or 0) >= one.begin


def _worker_died(launch: Launch, event: Event) -> None:
    one, code = launch.rounds[-1], event.get("exitcode")
    if one.failure is None and not one.is_over:
        one.failure = Failure(_at(event), "died", whole(event, "rank", -1), code if type(code) is int else None)


def _hang(launch: Launch, event: Event) -> None:
    one = launch.rounds[-1]
    if one.failure is None and not one.is_over:
        silent = max(0, nanoseconds(event, "silent") or 0)
        culprits = event.get("culprits")
        first = culprits[0] if isinstance(culprits, list) and culprits else -1
        one.failure = Failure(_at(event), "hung", first if type(first) is int else -1, None, silent)


def _worker_failed(launch: Launch, event: Event) -> None:
    """Why: that is looked for when all are stopped, and not when the first death is seen."""
    one = launch.rounds[-1]
    if one.failure is not None and one.failure.rank == whole(event, "rank", -1) and not one.is_over:
        one.failure = replace(one.failure, **vars(FailureCause.of(event)))


def _workers_stopped(launch: Launch, event: Event) -> None:
    if not launch.rounds[-1].is_over:
        launch.rounds[-1].stopped = _at(event)


def _workers_finished(launch: Launch, event: Event) -> None:
    if not launch.rounds[-1].is_over:
        launch.rounds[-1].finished = _at(event)


_TOLD = {
    "job_started": _job_started,
    "rendezvous": _rendezvous,
    "workers_started": _workers_started,
    "worker_joined": _worker_joined,
    "resumed": _loaded,
    "started_fresh": _loaded,
    "first_step": _first_step,
    "progress": _progress,
    "worker_died": _worker_died,
    "hang": _hang,
    "worker_failed": _worker_failed,
    "workers_stopped": _workers_stopped,
    "workers_finished": _workers_finished,
    "job_ended": _job_ended,
}
ACCOUNTED = frozenset(_TOLD)
"""The events by which time is accounted for."""
