"""The account of offloading: bytes moved and kept, waits, and the predictions of the plan."""

from dataclasses import dataclass

from fastckpt._core.byte_sizes import binary, decimal
from fastckpt._core.policy.offload_plan import OffloadPlan


@dataclass(frozen=True)
class Prediction:
    """One of the values that a plan predicts, and its measurement.

    Attributes:
        planned: As predicted; None if no forward had a plan yet.
        measured: Of the last forward whose backward is over.
    """

    planned: float | None = None
    measured: float = 0.0


@dataclass(frozen=True)
class OffloadReport:
    """Offloading since the start.

    Attributes:
        directory: The directory.
        budget: Bytes of activations in memory, at most.
        half: 32-bit floats are stored in 16 bits.
        forwards: Number of forwards.
        written: Bytes written.
        read: Bytes read.
        kept: Bytes that the last forward kept in memory.
        left: Bytes of its tensors below a MiB, which no budget counts.
        peak: Most bytes of activations in memory since the last forward began.
        waited_for_writes: Seconds of forwards waiting for the budget.
        waited_for_reads: Seconds of backwards waiting for reads.
        wait: Seconds that a step waits.
        wrote: Bytes that a step writes.
        write_rate: Bytes per second while writing.
        read_rate: Bytes per second while reading.
        direct: Transfers bypass the page cache.
        gpu_way: Way from GPUs: "GPUDirect Storage", "pinned memory" and the reason, or "".
        failure: Reason why offloading ended; else empty.
    """

    directory: str
    budget: int
    half: bool
    forwards: int = 0
    written: int = 0
    read: int = 0
    kept: int = 0
    left: int = 0
    peak: int = 0
    waited_for_writes: float = 0.0
    waited_for_reads: float = 0.0
    wait: Prediction = Prediction()
    wrote: Prediction = Prediction()
    write_rate: float = 0.0
    read_rate: float = 0.0
    direct: bool = True
    gpu_way: str = ""
    failure: str = ""

    def __str__(self) -> str:
        way = "past the page cache" if self.direct else "through the page cache"
        lines = [
            f"activations offloaded to {self.directory}, {way}: {self.forwards} forwards",
            f"  written {decimal(self.written)} at {decimal(int(self.write_rate))}/s, "
            f"read {decimal(self.read)} at {decimal(int(self.read_rate))}/s",
            f"  in memory at most {binary(self.peak)} of a budget of {binary(self.budget)}; the last forward kept "
            f"{binary(self.kept)}, and {binary(self.left)} in tensors below 1 MiB",
            f"  waited {self.waited_for_writes:.3f} s for writes, {self.waited_for_reads:.3f} s for reads",
        ]
        if self.wait.planned is not None and self.wrote.planned is not None:
            lines.append(
                f"  a step: planned {decimal(int(self.wrote.planned))} written, {self.wait.planned:.3f} s waited; "
                f"measured {decimal(int(self.wrote.measured))}, {self.wait.measured:.3f} s"
            )
        if self.gpu_way:
            lines.append(f"  from GPUs by {self.gpu_way}")
        if self.half:
            lines.append("  floats of 32 bits were stored in 16: gradients are not those of a run without offloading")
        if self.failure:
            lines.append(f"  ended: {self.failure}")
        return "\n".join(lines)


def outcomes(plan: OffloadPlan | None, wait: float, written: int) -> tuple[Prediction, Prediction]:
    """Return the predicted and the actual values of the wait, and of the bytes written."""
    if plan is None:
        return Prediction(None, wait), Prediction(None, written)
    return Prediction(plan.predicted_wait, wait), Prediction(plan.written, written)
