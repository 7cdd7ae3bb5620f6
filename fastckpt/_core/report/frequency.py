"""Decisions on how often to save, read from event logs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fastckpt._core.ipc.messages import Decided
from fastckpt._core.report.events import Event, is_time, text, whole


@dataclass(frozen=True)
class DecidedIntervals(Decided):
    """One decision, as `Decided` gives it.

    Attributes:
        at: Time of the record, in nanoseconds since the epoch.
        directory: The checkpoint directory that it is about.
    """

    at: int
    directory: str

    @property
    def matters(self) -> bool:
        """Return whether the decision changes anything."""
        return self.changed or self.memory is None


def decided(events: Iterable[Event], offset: int) -> Iterator[DecidedIntervals]:
    """Decisions that an agent recorded; ``offset`` makes an instant of its clock one since the epoch."""
    for event in events:
        if event["event"] == "frequency":
            yield DecidedIntervals(
                step=whole(event, "step", -1),
                memory=_steps(event, "memory"),
                storage=_steps(event, "storage"),
                overhead=_part(event, "overhead"),
                bound=_part(event, "bound"),
                changed=event.get("changed") is True,
                why=text(event, "why"),
                at=round(event["monotonic"] * 1e9) + offset,
                directory=text(event, "directory"),
            )


def _steps(event: Event, name: str) -> int | None:
    steps = whole(event, name, 0)
    return steps if steps > 0 else None


def _part(event: Event, name: str) -> float | None:
    value = event.get(name)
    return float(value) if is_time(value) else None
