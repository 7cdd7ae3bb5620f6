"""What was decided on how often to save, as the logs tell it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fastckpt._core.report.events import Event, is_time, text, whole


@dataclass(frozen=True)
class DecidedIntervals:
    """One decision.

    Attributes:
        at: When it was told, in nanoseconds since the epoch.
        directory: The checkpoint directory that it is about.
        step: After which it counts.
        memory: Steps from one snapshot to the next; None while training was profiled first. ``storage``: of persists.
        overhead: The part of training time that checkpoints took until then; None if that was not measured.
        bound: The part that they may take; None if the user gave the intervals.
        changed: Whether the intervals were others before.
        why: For people.
    """

    at: int
    directory: str
    step: int
    memory: int | None
    storage: int | None
    overhead: float | None
    bound: float | None
    changed: bool
    why: str

    @property
    def matters(self) -> bool:
        """Whether something is otherwise from then on."""
        return self.changed or self.memory is None


def decided(events: Iterable[Event], offset: int) -> Iterator[DecidedIntervals]:
    """What an agent recorded; ``offset`` makes an instant of its clock one since the epoch."""
    for event in events:
        if event["event"] == "frequency":
            yield DecidedIntervals(
                round(event["monotonic"] * 1e9) + offset, text(event, "directory"), whole(event, "step", -1),
                _steps(event, "memory"), _steps(event, "storage"), _part(event, "overhead"), _part(event, "bound"),
                event.get("changed") is True, text(event, "why"),
            )  # fmt: skip


def _steps(event: Event, name: str) -> int | None:
    steps = whole(event, name, 0)
    return steps if steps > 0 else None


def _part(event: Event, name: str) -> float | None:
    value = event.get(name)
    return float(value) if is_time(value) else None
