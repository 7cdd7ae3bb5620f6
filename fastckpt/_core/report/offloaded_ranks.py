"""Ranks that offload activations, read from event logs: the plan, the result, and the end."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fastckpt._core.report.events import Event, nanoseconds, text, whole


@dataclass(frozen=True)
class OffloadEnd:
    """An end of offloading in one process: its time in nanoseconds since the epoch, place, cause and remedy."""

    at: int
    directory: str
    error: str
    remedy: str


@dataclass
class OffloadedRank:
    """A rank that offloads; times are nanoseconds. Unknown values are None, such as results before a step is over.

    Attributes:
        node: The node on which it was last.
        directory: Directory to which it offloads.
        budget: Bytes that may be in memory.
        saved: Bytes that a forward saves, and ``kept`` those that stay in memory, by the last plan.
        forwards: Forwards of all its processes.
        written: Bytes that these wrote, and ``read`` those that they read.
        waited_for_writes: Time that forwards waited, and ``waited_for_reads`` that backwards did.
        steps: Steps that had a plan; the fields below are the mean of one of them.
        planned_written: Bytes that it was to write, and ``step_written`` those that it wrote.
        predicted_wait: Time by which it was to be longer, and ``step_wait`` time that it waited.
        ends: In order of time; its processes that were started later offload again.
    """

    node: int
    rank: int
    directory: str = ""
    budget: int | None = None
    saved: int | None = None
    kept: int | None = None
    forwards: int = 0
    written: int = 0
    read: int = 0
    waited_for_writes: int = 0
    waited_for_reads: int = 0
    steps: int = 0
    planned_written: int | None = None
    step_written: int | None = None
    predicted_wait: int | None = None
    step_wait: int | None = None
    ends: list[OffloadEnd] = field(default_factory=list)


def offloaded_ranks(launches: Iterable[tuple[int, Sequence[Event], int]]) -> list[OffloadedRank]:
    """The ranks that offload, by number.

    Args:
        launches: The node of each launch, its events, and the offset of its clock to the epoch.
    """
    found = dict[int, OffloadedRank]()
    last = dict[int, dict[tuple[int, int, int], Event]]()
    for number, (node, events, offset) in enumerate(launches):
        for event in events:
            rank = whole(event, "rank", -1)
            if event["event"] not in _KINDS or rank < 0:
                continue
            one = found.setdefault(rank, OffloadedRank(node, rank))
            one.node, one.directory = node, text(event, "directory")
            match event["event"]:
                case "offload_planned":
                    _plan(one, event)
                case "offload_measured":
                    # A later one of the same process has the counts of those before it.
                    last.setdefault(rank, {})[number, whole(event, "worker", 0), whole(event, "number", 0)] = event
                case _:
                    at = round(event["monotonic"] * 1e9) + offset
                    one.ends.append(OffloadEnd(at, one.directory, text(event, "error"), text(event, "remedy")))
    for rank, one in found.items():
        _measure(one, list(last.get(rank, {}).values()))
    return [found[rank] for rank in sorted(found)]


_KINDS = ("offload_planned", "offload_measured", "offload_ended")


def _plan(one: OffloadedRank, event: Event) -> None:
    one.budget, one.saved, one.kept, one.planned_written = (
        max(0, whole(event, name, 0)) for name in ("budget", "saved", "kept", "written")
    )
    one.predicted_wait = max(0, nanoseconds(event, "predicted_wait") or 0)


def _measure(one: OffloadedRank, events: Sequence[Event]) -> None:
    """Add up the reports of the processes of a rank."""

    def numbers(name: str) -> Iterator[int]:
        return (max(0, whole(event, name, 0)) for event in events)

    def times(name: str) -> Iterator[int]:
        return (max(0, nanoseconds(event, name) or 0) for event in events)

    one.forwards, one.written, one.read, one.steps = (
        sum(numbers(name)) for name in ("forwards", "written", "read", "steps")
    )
    one.waited_for_writes, one.waited_for_reads = sum(times("waited_for_writes")), sum(times("waited_for_reads"))
    if one.steps:
        one.planned_written, one.step_written = (
            sum(numbers(name)) // one.steps for name in ("planned_written", "step_written")
        )
        one.predicted_wait, one.step_wait = (sum(times(name)) // one.steps for name in ("predicted_wait", "step_wait"))
