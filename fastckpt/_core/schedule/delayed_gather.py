"""An all-gather of small values; the result is read some steps after they were sent."""

from typing import Any

from fastckpt._core.client.collective import Agreement, Answers


class DelayedGather:
    """One all-gather at a time, of which no rank waits for the slowest to send, unless that is late by many steps.

    Args:
        ranks: The agreement to use; in use for nothing else while values are pending.
    """

    def __init__(self, ranks: Agreement) -> None:
        self._ranks = ranks
        self._outstanding: tuple[int, Answers] | None = None

    @property
    def pending(self) -> bool:
        """Return whether a value was sent and the result not read."""
        return self._outstanding is not None

    def send(self, value: Any, until: int) -> None:
        """Send this rank's value (JSON); `poll` gives those of all ranks from the turn ``until`` on."""
        self._outstanding = until, self._ranks.send(value)

    def poll(self, turn: int) -> list[Any] | None:
        """The values of all ranks, once, if they are due at this turn; it then waits for those that are missing."""
        if self._outstanding is None or turn < self._outstanding[0]:
            return None
        _, answers = self._outstanding
        # Cleared before the wait: if a rank has died, its error must not leave a gather that is due at every turn.
        self._outstanding = None
        return answers()
