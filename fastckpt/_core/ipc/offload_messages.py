"""Messages of a worker that offloads activations, and the events that they are recorded as.

None of them is answered. docs/reference/events.md describes the events.
"""

from dataclasses import dataclass

from fastckpt._core import metrics


@dataclass(frozen=True)
class OffloadPlanned:
    """A step was profiled, and the writes of similar steps were planned.

    Attributes:
        number: Number of the `ActivationOffload` in its process, from 1.
        directory: Directory to which it offloads.
        profiled: Steps that were profiled so far: of those that come in quick succession, not each is reported.
        saved: Bytes that the forward saves.
        offloaded: Bytes of these that leave memory; ``kept`` are the others.
        compressed: Tensors that are compressed.
        written: Bytes that offloading them takes in the file.
        budget: Bytes that may be in memory.
        predicted_wait: Seconds by which such a step is longer.
    """

    number: int
    directory: str
    profiled: int
    saved: int
    offloaded: int
    kept: int
    compressed: int
    written: int
    budget: int
    predicted_wait: float


@dataclass(frozen=True)
class OffloadMeasured:
    """Measurements so far; a later message of the same process and number includes the earlier ones.

    Attributes:
        number: Number of the `ActivationOffload` in its process, from 1.
        directory: Directory to which it offloads.
        forwards: Forwards so far.
        written: Bytes written in all, ``read`` bytes read.
        waited_for_writes: Seconds that forwards waited in all, ``waited_for_reads`` that backwards did.
        steps: Steps that had a plan, and whose backward is over; the fields below are of these.
        planned_written: Bytes that their plans had them write, ``step_written`` bytes that they wrote.
        predicted_wait: Seconds by which they were to be longer, ``step_wait`` seconds that they waited.
    """

    number: int
    directory: str
    forwards: int
    written: int
    read: int
    waited_for_writes: float
    waited_for_reads: float
    steps: int
    planned_written: int
    step_written: int
    predicted_wait: float
    step_wait: float


@dataclass(frozen=True)
class OffloadEnded:
    """Notice that nothing is offloaded any more.

    Attributes:
        number: Number of the `ActivationOffload` in its process, from 1.
        directory: Directory to which it offloaded.
        error: Reason why it has ended.
        remedy: Remedy for the user.
    """

    number: int
    directory: str
    error: str
    remedy: str


OffloadMessage = OffloadPlanned | OffloadMeasured | OffloadEnded


def record_offload(rank: int, worker: int, message: OffloadMessage) -> None:
    """Record the event that a message of a rank, which is the process ``worker``, reports."""
    match message:
        case OffloadPlanned():
            metrics.event("offload_planned", rank=rank, worker=worker, **vars(message))
        case OffloadMeasured():
            metrics.event("offload_measured", rank=rank, worker=worker, **vars(message))
        case OffloadEnded():
            metrics.event("offload_ended", rank=rank, worker=worker, **vars(message))
