"""One launch on one node, reconstructed from its events: rounds of workers, and how far each came when."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from fastckpt._core.report.events import Event, nanoseconds, objects, text, whole


@dataclass(frozen=True)
class Load:
    """A rank's load: its end, its duration, and the step and tier that were loaded (-1 and empty for none)."""

    at: int
    seconds: int
    step: int = -1
    tier: str = ""


@dataclass(frozen=True, kw_only=True)
class FailureCause:
    """The cause of a failure, as the agent found it when all workers were stopped.

    Attributes:
        exception: Type and message of the worker's exception; this and the next three are empty if not known.
        frame: Place of the failure, or of the hang.
        host: Host of the rank.
        log: The file that has its stderr.
        restarts_left: Number of restarts left after this one, of ``restarts``; None if it is not known.
    """

    exception: str = ""
    frame: str = ""
    host: str = ""
    log: str = ""
    restarts_left: int | None = None
    restarts: int | None = None

    @classmethod
    def of(cls, event: Event) -> Self:
        """Read an event ``worker_failed``."""
        return cls(
            exception=text(event, "exception"),
            frame=text(event, "frame"),
            host=text(event, "host"),
            log=text(event, "log"),
            restarts_left=whole(event, "restarts_left", 0),
            restarts=whole(event, "restarts", 0),
        )


@dataclass(frozen=True)
class AwaitedRank:
    """The rank of another node for which this one's ranks waited when the job hung.

    Attributes:
        rank: Its number; -1 if only hosts are known where it may be, since their agents gave no answer.
        host: Host of the rank.
        place: Place at which it was caught; empty if that is not known.
        at: Time at which this node learned of it.
    """

    rank: int
    host: str
    place: str
    at: int

    @classmethod
    def of(cls, event: Event) -> Self | None:
        """Read an event ``hang`` or ``hang_elsewhere``; None if it names no such rank."""
        found = event.get("awaited")
        if not isinstance(found, dict) or not text(found, "host"):
            return None
        return cls(whole(found, "rank", -1), text(found, "host"), text(found, "place"), _at(event))


@dataclass(frozen=True)
class Failure(FailureCause):
    """The failure that ended a round: a rank ``died`` or ``hung``; ``silent`` is how long before it was noticed."""

    at: int
    kind: str
    rank: int
    exitcode: int | None = None
    silent: int = 0
    awaited: AwaitedRank | None = None


@dataclass(frozen=True)
class Sample:
    """The progress of the furthest worker of a node.

    Attributes:
        at: Time of the sample.
        beat: Time of a worker's last report.
        steps: Steps completed since the worker started.
        step: The newest step that a save or load named; -1 for none.
        named: Number of steps completed when it was named.
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
    """One generation of workers. Instants are nanoseconds of the agent's monotonic clock; None if not reached.

    Attributes:
        begin: Time at which the agent began to look for the other nodes.
        parked: Time at which it began to wait as a spare for a place among them.
        met: Time at which it had found them.
        started: Time at which the worker processes were there.
        pids: The worker processes, by local rank.
        joined: Time at which each local rank had a checkpointer.
        imported: Time at which each had imported its modules.
        loads: The first load of each local rank.
        first: Time at which each had completed a step.
        failure: The first failure on this node.
        awaited: The rank of another node that made the job hang, as the agent of another one has found last.
        stopped: Time at which all were dead and reaped.
        finished: Time at which all had ended well.
    """

    begin: int
    parked: int | None = None
    met: int | None = None
    started: int | None = None
    pids: dict[int, int] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    imported: dict[int, int] = field(default_factory=dict)
    loads: dict[int, Load] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    failure: Failure | None = None
    awaited: AwaitedRank | None = None
    stopped: int | None = None
    finished: int | None = None

    @property
    def is_over(self) -> bool:
        """Return whether its workers have ended."""
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
    """Return for each checkpoint directory whether it is ever loaded from, and the most saves of one agent's workers.

    The greater one shows how far the job is: others may have numbers of steps of their own, or none for long.
    """
    found = dict[str, tuple[bool, int]]()
    for event in (event for events in logs for event in events):
        weigh(found, event)
    return found


def weigh(found: dict[str, tuple[bool, int]], event: Event) -> None:
    """Add an event to the `weights` of directories."""
    if event["event"] in _OF_DIRECTORY:
        loaded, saves = found.get(text(event, "directory"), (False, 0))
        loaded |= event["event"] in ("resumed", "started_fresh")
        found[text(event, "directory")] = loaded, max(saves, whole(event, "saves", 0))


_OF_DIRECTORY = ("worker_joined", "resumed", "started_fresh", "progress")
_OF_STARTS = ("job_started", "waits_as_spare", "rendezvous", "workers_started", "first_step", *_OF_DIRECTORY)
_OF_ENDS = (
    "worker_died",
    "hang",
    "hang_elsewhere",
    "worker_failed",
    "workers_stopped",
    "workers_finished",
    "job_ended",
)
ACCOUNTED = frozenset({*_OF_STARTS, *_OF_ENDS})
"""The events by which time is accounted for."""


def launch_of(events: Sequence[Event], weights: Mapping[str, tuple[bool, int]]) -> Launch:
    """The launch that the events of one agent describe: at least one, in the order of its clock.

    Of several checkpoint directories, the one of the greatest weight counts.
    """
    launch = begun(events[0])
    launch.end, launch.events = _at(events[-1]), events
    directory = heaviest({directory_of(event) for event in events}, weights)
    for event in events:
        if directory_of(event) in (None, directory):
            record(launch, event)
    return launch


def begun(first: Event) -> Launch:
    """A launch that begins with an event, which is not recorded yet."""
    launch = Launch(_at(first), _at(first), round(first["time"] * 1e9), pid=first["pid"])
    launch.rounds.append(LaunchRound(launch.begin))
    return launch


def directory_of(event: Event) -> str | None:
    """The checkpoint directory of an event; None for one of the whole launch."""
    return text(event, "directory") if event["event"] in _OF_DIRECTORY else None


def heaviest(directories: Iterable[str | None], weights: Mapping[str, tuple[bool, int]]) -> str:
    """The directory of the greatest weight; empty if there is none."""
    return max((name for name in directories if name is not None), key=lambda name: (weights[name], name), default="")


def record(launch: Launch, event: Event) -> None:
    """Record an event of a launch; those of other checkpoint directories must be left out."""
    _begin(launch, event)
    _end(launch, event)


def _at(event: Event) -> int:
    at: float = event["monotonic"]
    return round(at * 1e9)


def _round_to_start(launch: Launch, at: int, *, has_begun: bool) -> LaunchRound:
    """The round that is to start its workers: a new one if the log lacks the end of the last one."""
    last = launch.rounds[-1]
    if last.is_over or has_begun:
        launch.rounds.append(LaunchRound(last.stopped or at))
    return launch.rounds[-1]


def _begin(launch: Launch, event: Event) -> None:
    """Record an event of a launch, of the start of a round, or of its progress."""
    last, at, rank = launch.rounds[-1], _at(event), whole(event, "local_rank", -1)
    match event["event"]:
        case "job_started":
            launch.host, launch.boot = text(event, "host"), text(event, "boot")
            launch.run_id, launch.script = text(event, "run_id"), text(event, "script")
        case "waits_as_spare" | "rendezvous":
            _meet(launch, event)
        case "workers_started":
            one = _round_to_start(launch, at, has_begun=last.started is not None)
            one.started, one.pids = at, _pids(event)
        case "worker_joined":
            last.joined.setdefault(rank, at)
            last.imported.setdefault(rank, min(nanoseconds(event, "imported") or at, at))
        case "resumed" | "started_fresh":
            seconds = max(0, nanoseconds(event, "seconds") or 0)
            last.loads.setdefault(rank, Load(at, seconds, whole(event, "step", -1), text(event, "tier")))
        case "progress":
            _progress(last, event)
        case "job_ended":
            launch.outcome = text(event, "outcome")


def _meet(launch: Launch, event: Event) -> None:
    """Record that a node waits as a spare, or has met the others."""
    at = _at(event)
    one = _round_to_start(launch, at, has_begun=launch.rounds[-1].met is not None)
    if event["event"] == "rendezvous":
        one.met = at
        launch.node = whole(event, "node", 0) if len(launch.rounds) == 1 else launch.node
    else:
        one.parked = one.parked or at


def _end(launch: Launch, event: Event) -> None:
    """Record an event of the first step of a round, or of its end: the first end counts."""
    one, at = launch.rounds[-1], _at(event)
    match event["event"]:
        case "first_step" if one.begin <= (first := nanoseconds(event, "at") or -1) <= at:
            one.first.setdefault(whole(event, "local_rank", -1), first)
        case "worker_died" if one.failure is None and not one.is_over:
            code = event.get("exitcode")
            one.failure = Failure(at, "died", whole(event, "rank", -1), code if type(code) is int else None)
        case "hang" | "hang_elsewhere" if one.failure is None and not one.is_over:
            _hang(one, event)
        case "worker_failed" if one.failure is not None and not one.is_over:
            # Causes are looked for when all workers are stopped, not when the first death is seen.
            if one.failure.rank == whole(event, "rank", -1):
                one.failure = replace(one.failure, **vars(FailureCause.of(event)))
        case "workers_stopped" if not one.is_over:
            one.stopped = at
        case "workers_finished" if not one.is_over:
            one.finished = at


def _hang(one: LaunchRound, event: Event) -> None:
    one.awaited = AwaitedRank.of(event)
    if event["event"] == "hang":
        culprits = event.get("culprits")
        culprit = culprits[0] if isinstance(culprits, list) and culprits else -1
        silent = max(0, nanoseconds(event, "silent") or 0)
        one.failure = Failure(_at(event), "hung", culprit if type(culprit) is int else -1, None, silent, one.awaited)


def _pids(event: Event) -> dict[int, int]:
    """The worker processes, by local rank."""
    found = event.get("pids")
    pids = found.items() if isinstance(found, dict) else ()
    return {int(n): pid for n, pid in pids if n.isascii() and n.isdigit() and len(n) < 8 and type(pid) is int}


def _progress(one: LaunchRound, event: Event) -> None:
    reports = [rank for rank in objects(event, "ranks") if _is_of(rank, one)]
    if one.started is None or not reports:
        return
    at, far = _at(event), max(reports, key=lambda rank: whole(rank, "steps", 0))
    steps = max(0, whole(far, "steps", 0))
    sample = Sample(
        at=at,
        beat=max(min(nanoseconds(rank, "beat") or 0, at) for rank in reports),
        steps=steps,
        step=max(-1, whole(far, "step", -1)),
        named=min(steps, max(0, whole(far, "named", 0))),
        loaded=max(-1, whole(far, "loaded", -1)),
        stalled=max(0, *(nanoseconds(rank, "stalled") or 0 for rank in reports)),
    )
    one.samples.append(sample)


def _is_of(rank: Event, one: LaunchRound) -> bool:
    """Return whether a worker of this round reported it: before its first report, its predecessor's is still there."""
    return one.started is not None and (nanoseconds(rank, "beat") or 0) >= one.begin
