"""Report on all launches of a job: where its time went, each failure's timeline, its checkpoints."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from fastckpt._core.report import goodput
from fastckpt._core.report.events import Event, Log, launches, nanoseconds, text, whole
from fastckpt._core.report.frequency import DecidedIntervals, decided
from fastckpt._core.report.goodput import Spent, Steps, trains_from
from fastckpt._core.report.host_failures import HostFailures, host_failures
from fastckpt._core.report.launches import (
    AwaitedRank,
    Failure,
    FailureCause,
    Launch,
    LaunchRound,
    Sample,
    launch_of,
    weights,
)
from fastckpt._core.report.measured import Measured, measured
from fastckpt._core.report.offloaded_ranks import OffloadedRank, offloaded_ranks
from fastckpt._core.report.slow_spells import SlowSpell, slow_spells

_AFTER_HANG = 60 * 10**9
"""Nanoseconds within which workers end because another node has found a hang."""


@dataclass(frozen=True)
class Placed:
    """A launch, its time, and the offset of its clock to nanoseconds since the epoch."""

    launch: Launch
    spent: Spent
    offset: int

    @property
    def begin(self) -> int:
        """The begin of the launch, since the epoch."""
        return self.launch.begin + self.offset

    @property
    def end(self) -> int:
        """The time of its last event, since the epoch."""
        return self.launch.end + self.offset


@dataclass(frozen=True)
class Recovery(FailureCause):
    """A failure on a node and the recovery, in nanoseconds after it was noticed; None if not reached.

    Attributes:
        at: Time at which it was noticed, since the epoch; of an agent, when it last logged an event.
        kind: ``died``, ``hung``; ``agent`` if the agent itself died; ``elsewhere`` if the workers were stopped for the
            sake of another node.
        silent: Duration of the hang before.
        step: From which step and ``tier`` the workers went on; -1 for a fresh start.
        load: Duration of the last rank's load.
        repeated: Steps that had to be done once more.
        awaited: The rank of another node for which these waited, if the job hung.
    """

    node: int
    at: int
    kind: str
    rank: int
    exitcode: int | None
    silent: int
    stopped: int | None
    relaunched: int | None = None
    met: int | None = None
    started: int | None = None
    imported: int | None = None
    joined: int | None = None
    resumed: int | None = None
    first_step: int | None = None
    load: int | None = None
    step: int | None = None
    tier: str = ""
    repeated: int = 0
    awaited: AwaitedRank | None = None


@dataclass(frozen=True)
class Counts:
    """Counts of checkpoints: ``saved_bytes`` are in the memory of all nodes; the time is of the slowest node.

    ``newest_upload`` is the newest that arrived in a remote store: history (-1 if that was not recorded) and step.
    ``newest_copied`` is the newest that each node had copied to others; ``fetched_bytes`` came back from there.
    """

    saves: int = 0
    saved_bytes: int = 0
    skipped: int = 0
    persisted: int = 0
    persisted_bytes: int = 0
    persist_time: int = 0
    persist_failures: int = 0
    uploads: int = 0
    upload_failures: int = 0
    newest_upload: tuple[int, int] | None = None
    copied: int = 0
    copied_bytes: int = 0
    copies_skipped: int = 0
    newest_copied: tuple[int, int] | None = None
    fetched_bytes: int = 0
    bad_checkpoints: int = 0


@dataclass(frozen=True)
class Supersession:
    """Another job has replaced a launch: the place, the history that it opened, and the holder.

    ``at`` is when the launch found out, in nanoseconds since the epoch.
    """

    node: int
    at: int
    place: str
    history: int
    holder: str


@dataclass(frozen=True)
class Report:
    """The report on a job.

    Attributes:
        nodes: The launches of each node, by its rank, in order.
        lost: Nanoseconds by cause, of all nodes; ``goodput.USEFUL`` is one of the causes.
        steps: Progress of the job.
        failures: By time.
        decisions: On how often to save, by time.
        superseded: By another job, by time.
        unreadable: Lines of the logs that are no events.
        events_lost: Events that an agent could not write.
        offloaded: Ranks that offload activations, by number.
        metrics: Last measurements of each node, by its number.
        hosts: The hosts that have failed, the worst first.
        slow: Times in which a rank was slow, in order.
    """

    nodes: Mapping[int, list[Placed]]
    lost: Mapping[str, int]
    steps: Steps
    failures: list[Recovery]
    counts: Counts
    decisions: list[DecidedIntervals]
    superseded: list[Supersession]
    unreadable: int = 0
    events_lost: int = 0
    offloaded: list[OffloadedRank] = field(default_factory=list)
    metrics: list[Measured] = field(default_factory=list)
    hosts: list[HostFailures] = field(default_factory=list)
    slow: list[SlowSpell] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Nanoseconds of all nodes."""
        return sum(self.lost.values())

    @property
    def steps_per_second(self) -> float | None:
        """Steps done for the first time in a second of useful time; None if there was none."""
        useful = self.lost[goodput.USEFUL]
        return self.steps.new * len(self.nodes) * 1e9 / useful if useful else None

    @property
    def goodput(self) -> float | None:
        """The part of it that was useful; None if no worker reported a step."""
        return self.lost[goodput.USEFUL] / self.total if self.total and self.steps.new else None


def report(logs: Iterable[Log]) -> Report:
    """The report on logs, oldest first, of several launches and nodes; logs may be torn, or still grow."""
    logs = list(logs)
    agents = [events for log in logs for events in launches(log)]
    heavy = weights(agents)
    found = [launch_of(events, heavy) for events in agents]
    offsets = dict[tuple[str, str], int]()
    chains = _chains(found, [_offset(launch, offsets) for launch in found])
    nodes, times, failures = dict[int, list[Placed]](), list[Mapping[str, int]](), list[Recovery]()
    unit = goodput.unit_of(found)
    progress = {node: Steps(unit) for node in sorted(chains)}
    for node, steps in progress.items():
        _see_in_hindsight([launch for launch, _ in chains[node]])
        nodes[node] = [Placed(launch, goodput.spend(launch, steps), offset) for launch, offset in chains[node]]
        times += [placed.spent.by_cause() for placed in nodes[node]]
        times += [{goodput.DOWN: gap} for gap in _gaps(nodes[node])]
        failures += _recoveries(nodes[node])
    decisions = (one for chain in nodes.values() for at in chain for one in decided(at.launch.events, at.offset))
    lost = sum(whole(event, "count", 0) for each in found for event in each.events if event["event"] == "events_lost")
    failures.sort(key=lambda failure: failure.at)
    struck = [[(one.kind, one.host) for one in incident] for incident in incidents(failures)]
    return Report(
        nodes,
        goodput.total(times),
        max(progress.values(), key=lambda steps: steps.new, default=Steps()),
        failures,
        _counts(nodes),
        sorted(decisions, key=lambda one: one.at),
        sorted(_superseded(nodes), key=lambda one: one.at),
        sum(log.unreadable for log in logs),
        lost,
        offloaded_ranks((node, at.launch.events, at.offset) for node, chain in nodes.items() for at in chain),
        [last for node, chain in nodes.items() if (last := _measured(node, chain)) is not None],
        host_failures(struck, (event for each in found for event in each.events)),
        slow_spells((at.launch.events, at.offset) for chain in nodes.values() for at in chain),
    )


def _measured(node: int, chain: list[Placed]) -> Measured | None:
    found = (measured(node, placed.launch.events, placed.offset) for placed in reversed(chain))
    return next((last for last in found if last is not None), None)


def _chains(found: Iterable[Launch], offsets: Iterable[int]) -> dict[int, list[tuple[Launch, int]]]:
    """The launches of each node one after the other, with their offsets: by the rank that they had at first.

    If another one of that rank still ran, since ranks have changed, a launch follows one that had ended.
    """
    chains = dict[int, list[tuple[Launch, int]]]()
    for launch, offset in zip(found, offsets, strict=True):
        node = launch.node
        if node in chains and not _had_ended(*chains[node][-1], launch, offset):
            free = (node for node, chain in chains.items() if _had_ended(*chain[-1], launch, offset))
            node = next(free, max(chains) + 1)
        chains.setdefault(node, []).append((launch, offset))
    return chains


def _had_ended(before: Launch, offset: int, after: Launch, later: int) -> bool:
    """Return whether one launch had ended when another began; a host that was booted between may have another clock."""
    if before.host == after.host and before.boot != after.boot:
        return True
    return before.end + offset <= after.begin + later


def _see_in_hindsight(chain: list[Launch]) -> None:
    """Correct the progress of a killed agent: its workers had come further, if the next launch resumes there."""
    for before, after in pairwise(chain):
        one, following = before.rounds[-1], next((one for one in after.rounds if one.loads), None)
        if following is None or one.is_over or trains_from(one) is None:
            continue
        step = max(load.step for load in following.loads.values())
        last = one.samples[-1] if one.samples else Sample(0, 0, 0, -1, 0, -1, 0)
        if step > last.step:
            one.samples.append(replace(last, at=before.end + 1, beat=before.end, step=step, named=last.steps))


def _offset(launch: Launch, offsets: dict[tuple[str, str], int]) -> int:
    """The offset of all launches in one boot of a host: its wall clock may jump, its monotonic one does not."""
    own = launch.wall - launch.begin
    return offsets.setdefault((launch.host, launch.boot), own) if launch.boot else own


def _gaps(chain: list[Placed]) -> Iterator[int]:
    """Times without an agent, though the job was not over."""
    for before, after in pairwise(chain):
        if before.launch.outcome != "succeeded":
            yield max(0, after.begin - before.end)


def _recoveries(chain: list[Placed]) -> Iterator[Recovery]:
    rounds = [(placed, i, one) for placed in chain for i, one in enumerate(placed.launch.rounds)]
    for (placed, _, one), after in zip(rounds, [*rounds[1:], None], strict=True):
        failure = one.failure
        if failure is None and one.stopped is not None and after and after[0] is placed:
            failure = Failure(one.stopped, "elsewhere", -1)
        if failure is None and not placed.launch.outcome and after and after[0] is not placed:
            failure = Failure(placed.launch.end, "agent", -1)
        if failure is not None:
            failure = replace(failure, awaited=failure.awaited or _awaited(one, failure))
            goes_on = after is not None and (after[0] is placed or not placed.launch.outcome)
            yield _recovery(placed, one, failure, after if goes_on else None)


def _awaited(one: LaunchRound, failure: Failure) -> AwaitedRank | None:
    """The rank for which a node's workers waited when they failed, or were stopped, since another node found a hang."""
    # A hang that was none, since its ranks went on, explains no failure that comes later.
    found = one.awaited
    return found if found is not None and 0 <= failure.at - found.at < _AFTER_HANG else None


def _recovery(
    placed: Placed, one: LaunchRound, failure: Failure, after: tuple[Placed, int, LaunchRound] | None
) -> Recovery:
    at = failure.at + placed.offset
    stopped = None if one.stopped is None else one.stopped - failure.at
    known = (placed.launch.node, at, failure.kind, failure.rank, failure.exitcode, failure.silent, stopped)
    why = {part.name: getattr(failure, part.name) for part in fields(FailureCause)}
    why["host"] = failure.host or placed.launch.host
    why["awaited"] = failure.awaited
    if after is None:
        return Recovery(*known, **why)
    there, index, new = after

    def since(instant: int | None) -> int | None:
        return None if instant is None else max(0, instant + there.offset - at)

    loads = list(new.loads.values())
    last = max(loads, key=lambda load: load.at, default=None)
    return Recovery(
        *known,
        relaunched=None if there is placed else since(there.launch.begin),
        met=since(new.met),
        started=since(new.started),
        imported=since(max((new.started or at, *new.imported.values()))) if new.imported else None,
        joined=since(max(new.joined.values(), default=None)),
        resumed=since(last.at if last else None),
        first_step=since(max(new.first.values(), default=None)),
        load=last.seconds if last else None,
        step=max(load.step for load in loads) if loads else None,
        tier=last.tier if last else "",
        repeated=there.spent.repeats[index],
        **why,
    )


def incidents(failures: Iterable[Recovery]) -> list[list[Recovery]]:
    """Failures in the order of time, those together that struck several nodes before training went on."""
    found = list[list[Recovery]]()
    over = 0
    for one in failures:
        if not found or one.at > over or any(one.node == other.node for other in found[-1]):
            found.append([])
            over = one.at + max(one.stopped or 0, one.first_step or 0)
        found[-1].append(one)
    return found


# --- checkpoints


def _counts(nodes: Mapping[int, list[Placed]]) -> Counts:
    """Each node counts all saves, and the whole of its persists: some nodes may not have been there all the time."""
    last = [[event for placed in chain for event in _last_progress(placed)] for chain in nodes.values()]
    seen = Counter(e["event"] for chain in nodes.values() for placed in chain for e in placed.launch.events)

    def numbers(name: str) -> list[int]:
        return [sum(max(0, whole(event, name, 0)) for event in own) for own in last]

    times = [sum(max(0, nanoseconds(event, "persist_seconds") or 0) for event in own) for own in last]
    copied = [own for chain in nodes.values() if (own := _events([chain], "replicated"))]
    return Counts(
        saves=max(numbers("saves"), default=0),
        saved_bytes=sum(numbers("saved_bytes")),
        skipped=max(numbers("skipped"), default=0),
        persisted=max(numbers("persisted"), default=0),
        persisted_bytes=max(numbers("persisted_bytes"), default=0),
        persist_time=max(times, default=0),
        persist_failures=seen["persist_failed"],
        uploads=seen["uploaded"],
        upload_failures=seen["upload_failed"],
        newest_upload=_newest(_events(nodes.values(), "uploaded")),
        copied=max(map(len, copied), default=0),
        copied_bytes=sum(max(0, whole(event, "bytes", 0)) for own in copied for event in own),
        copies_skipped=max((len(_events([chain], "replica_skipped")) for chain in nodes.values()), default=0),
        newest_copied=min((newest for own in copied if (newest := _newest(own))), default=None),
        fetched_bytes=sum(max(0, whole(event, "bytes", 0)) for event in _events(nodes.values(), "fetched")),
        bad_checkpoints=seen["bad_checkpoint"],
    )


def _superseded(nodes: Mapping[int, list[Placed]]) -> Iterator[Supersession]:
    for node, placed in ((node, placed) for node, chain in nodes.items() for placed in chain):
        for event in placed.launch.events:
            if event["event"] == "superseded":
                at = round(event["monotonic"] * 1e9) + placed.offset
                place, holder = text(event, "place"), text(event, "holder")
                yield Supersession(node, at, place, whole(event, "history", -1), holder)


def _events(chains: Iterable[list[Placed]], name: str) -> list[Event]:
    events = (event for chain in chains for placed in chain for event in placed.launch.events)
    return [event for event in events if event["event"] == name]


def _newest(events: Iterable[Event]) -> tuple[int, int] | None:
    """The newest save that events are about: history (-1 if that was not recorded) and step."""
    return max(((whole(event, "history", -1), whole(event, "step", -1)) for event in events), default=None)


def _last_progress(placed: Placed) -> Iterable[Event]:
    """The last counts in a launch, for each checkpoint directory."""
    return {text(event, "directory"): event for event in placed.launch.events if event["event"] == "progress"}.values()
