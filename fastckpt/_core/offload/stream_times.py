"""Times at which the stream of a GPU comes to points of a step: the host, which queues its work, is ahead of it."""

from collections.abc import Callable, Hashable
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the work of a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the stream has come to the event."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end_event: "Mark") -> float:
        """Milliseconds from this one to another."""


def recorded(device: torch.device) -> Mark:
    """A mark in the current stream of this thread."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event  # type: ignore[return-value]


class StreamTimes:
    """Times of one step on one device, without those for which its stream stood idle because the host waited.

    While the host waits, the stream goes on with queued kernels, and is idle from their end on. A kernel that is queued
    after the wait begins at once. So the time between a mark before the wait and one after it is the idle one.
    """

    def __init__(self, device: torch.device, mark: Callable[[torch.device], Mark] = recorded) -> None:
        self.device = device
        self._mark = mark
        # Each with the number of waits before it.
        self._notes: list[tuple[Hashable, Mark, int]] = []
        self._waits: list[tuple[Mark, Mark]] = []

    def note(self, what: Hashable) -> None:
        """Mark a point; of several of one name the last one counts."""
        self._notes.append((what, self._mark(self.device), len(self._waits)))

    def waited(self) -> None:
        """Mark the end of a wait of the host, which began right after the last note."""
        self._waits.append((self._notes[-1][1], self._mark(self.device)))

    @property
    def are_known(self) -> bool:
        """Return whether the stream has come to all marks."""
        return self._notes[-1][1].query() and (not self._waits or self._waits[-1][1].query())

    def idle(self) -> float:
        """Seconds for which the stream was idle; waits for the stream."""
        return sum(self._gaps())

    def seconds(self) -> dict[Hashable, float]:
        """The time of each point since the first one; waits for the stream."""
        gaps, first = self._gaps(), self._notes[0][1]
        self._notes[-1][1].synchronize()
        return {what: first.elapsed_time(mark) / 1e3 - sum(gaps[:waits]) for what, mark, waits in self._notes}

    def _gaps(self) -> list[float]:
        if self._waits:
            self._waits[-1][1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in self._waits]
