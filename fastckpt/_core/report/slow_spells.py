"""Times in which a rank was slow, read from event logs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fastckpt._core.report.events import Event, is_time, text, whole

_RESTART = ("workers_stopped", "workers_started")


@dataclass(frozen=True)
class SlowSpell:
    """A time in which a rank was slow.

    Attributes:
        rank: The rank, on ``host``.
        part: The part of its steps in which it lost most.
        cost: Share by which the job was slower, when it was found.
        begin: Time at which it was found, in nanoseconds since the epoch.
        end: Time at which it was as fast as the others again, or was stopped; None if its launch ended before that.
    """

    rank: int
    host: str
    part: str
    cost: float
    begin: int
    end: int | None = None


def slow_spells(launches: Iterable[tuple[Sequence[Event], int]]) -> list[SlowSpell]:
    """The times in which ranks were slow, in order; of each launch its events, and its clock's offset."""
    found = [one for events, offset in launches for one in _of_launch(events, offset)]
    return sorted(found, key=lambda one: (one.begin, one.rank))


def _of_launch(events: Sequence[Event], offset: int) -> Iterator[SlowSpell]:
    now = dict[int, SlowSpell]()
    for event in events:
        at = round(event["monotonic"] * 1e9) + offset
        if event["event"] in _RESTART:
            yield from (replace(one, end=at) for one in now.values())
            now = {}
        elif event["event"] == "straggler" and (rank := whole(event, "rank", -1)) >= 0:
            if event.get("slow") is True:
                cost = event.get("cost")
                one = SlowSpell(rank, text(event, "host"), text(event, "part"), cost if is_time(cost) else 0.0, at)
                now.setdefault(rank, one)
            elif rank in now:
                yield replace(now.pop(rank), end=at)
    yield from now.values()
