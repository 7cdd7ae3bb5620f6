"""The failures of a job, and the time that it was observed, across all its resumes."""

import time
from collections.abc import Sequence
from typing import Any

from fastckpt._core.policy.frequency.failures import mean_time_between


class FailureHistory:
    """Failures of this process, and of those before it, which the resumed checkpoint has recorded.

    Restarts without a save in between count, too: the launcher counts them.

    Args:
        launch: The name that restarted workers share with those before them, and with no other launch.
        restarts: Restarts of this launch, so far.
        before: A result of `state`; empty without a checkpoint.
    """

    def __init__(self, launch: str, restarts: int, before: Sequence[Any] = ()) -> None:
        seconds, failures, last_launch, last_restarts = before or (0.0, 0, "", 0)
        # Restarts since the checkpoint was saved. A checkpoint that an earlier launch saved has none of this launch's.
        self.failures: int = failures + max(0, restarts - (last_restarts if last_launch == launch else 0))
        self._launch, self._restarts, self._before = launch, restarts, float(seconds)
        self._since = time.monotonic()

    @property
    def mean_time_between_failures(self) -> float | None:
        """Seconds, from the checkpoint, and so alike on all ranks; None if nothing has failed."""
        # Not the time since this start: ranks start at different instants, and would decide unlike.
        return mean_time_between(self.failures, self._before)

    def state(self) -> list[Any]:
        """The state to keep in a checkpoint."""
        return [self._before + time.monotonic() - self._since, self.failures, self._launch, self._restarts]
