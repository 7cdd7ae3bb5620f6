"""Reports of offloading to the agent: the plan, the result, and its end; few of them, however long a job is."""

import itertools
import time
from collections.abc import Callable

from fastckpt._core.client import worker_reports
from fastckpt._core.ipc.offload_messages import OffloadEnded, OffloadMeasured, OffloadPlanned
from fastckpt._core.offload.forward_pass import ForwardPass
from fastckpt._core.offload.offload_report import OffloadReport
from fastckpt._core.policy.offload_plan import OffloadPlan

FIRST = 8
"""Plans that are reported whenever they are made: a training run with more has steps that always differ."""
PAUSE, RARELY = 1.0, 0.1
"""Seconds, and part of its age, until it reports again: a log grows with the logarithm of a job's length."""
REMEDY = (
    "Free space there, choose another directory for ActivationOffload, or give it a larger budget; then start again"
)
_numbers = itertools.count(1)


class OffloadLog:
    """The reports of one `ActivationOffload`.

    Args:
        directory: Directory to which it offloads.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._number = next(_numbers)
        self._begun = time.monotonic()
        self._plans_due = self._due = 0.0
        self._profiled = 0
        self._reported: tuple[int, bool] | None = None
        self._steps = self._planned_written = self._step_written = 0
        self._predicted_wait = self._step_wait = 0.0

    def planned(self, made: OffloadPlan, sizes: tuple[int, ...], budget: int) -> None:
        """A step was profiled that saves tensors of these sizes."""
        self._profiled += 1
        now = time.monotonic()
        if self._profiled > FIRST and now < self._plans_due:
            return
        self._plans_due = self._next(now)
        saved, offloaded = sum(sizes), sum(sizes[index] for index in made.offloaded)
        worker_reports.report(
            OffloadPlanned(
                number=self._number,
                directory=self._directory,
                profiled=self._profiled,
                saved=saved,
                offloaded=offloaded,
                kept=saved - offloaded,
                compressed=len(made.compressed),
                written=made.written,
                budget=budget,
                predicted_wait=float(made.predicted_wait),
            )
        )

    def came(self, made: OffloadPlan, forward: ForwardPass) -> None:
        """A step with a plan is over."""
        self._steps += 1
        self._planned_written += made.written
        self._step_written += forward.written
        self._predicted_wait += made.predicted_wait
        self._step_wait += forward.wait

    def measured(self, report: Callable[[], OffloadReport], failure: str) -> None:
        """Report the result, if that is due: the first step with a plan, a failure, and now and then."""
        if self._reported is None:
            is_due = self._steps > 0 or bool(failure)
        else:
            is_due = bool(failure) != self._reported[1] or time.monotonic() >= self._due
        if is_due:
            self.conclude(report, failure)

    def conclude(self, report: Callable[[], OffloadReport], failure: str) -> None:
        """Report the result, unless that is reported."""
        found = report()
        state = found.forwards, bool(failure)
        if state == self._reported:
            return
        self._reported, self._due = state, self._next(time.monotonic())
        worker_reports.report(
            OffloadMeasured(
                number=self._number,
                directory=self._directory,
                forwards=found.forwards,
                written=found.written,
                read=found.read,
                waited_for_writes=float(found.waited_for_writes),
                waited_for_reads=float(found.waited_for_reads),
                steps=self._steps,
                planned_written=self._planned_written,
                step_written=self._step_written,
                predicted_wait=float(self._predicted_wait),
                step_wait=float(self._step_wait),
            )
        )

    def ended(self, reason: str) -> None:
        """Log that nothing is offloaded any more, with the reason."""
        worker_reports.report(OffloadEnded(self._number, self._directory, reason, REMEDY))

    def _next(self, now: float) -> float:
        return now + max(PAUSE, RARELY * (now - self._begun))
