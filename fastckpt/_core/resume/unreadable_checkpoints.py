"""Checkpoints that are whole, and cannot be read at the moment: none that is older is taken in their place."""

import logging
import time
from collections.abc import Collection, Sequence

from fastckpt._core.client.collective import Agreement
from fastckpt._core.policy.resume import CheckpointLocation, choose
from fastckpt.errors import NoLoadableCheckpoint, PersistError

logger = logging.getLogger("fastckpt")

LIMIT = 45.0
"""Seconds for which a checkpoint that cannot be read is tried again; one that takes longer to say so is tried once."""
PAUSE = 3.0
"""Seconds between two attempts."""


def is_unreadable(faults: Collection[str]) -> bool:
    """Whether all of what was found wrong is that a store, or room for a download, was not to be had."""
    return bool(faults) and all(why.startswith(PersistError.__name__) for why in faults)


class UnreadableCheckpoints:
    """What the ranks of a resume could not read, though it is there; all of them say and ask the same of it."""

    def __init__(self, agreement: Agreement, rank: int) -> None:
        self._agreement, self._rank = agreement, rank
        self._why: dict[CheckpointLocation, str] = {}
        self._end: float | None = None

    def add(self, candidate: CheckpointLocation, why: str) -> None:
        """This one could not be read."""
        self._why[candidate] = why
        if self._end is None:
            self._end = time.monotonic() + LIMIT
            if self._rank == 0:
                logger.warning("%s. It is tried again for up to %.0f s", why, LIMIT)

    def choose(
        self, has: Sequence[Collection[CheckpointLocation]], excluded: set[CheckpointLocation]
    ) -> tuple[CheckpointLocation, ...] | None:
        """As `policy.resume.choose`; before an older one is chosen, what could not be read is included again.

        Raises NoLoadableCheckpoint once that was done for long enough.
        """
        while self._is_newer_than(choices := choose(has, excluded)):
            self._wait()
            excluded -= self._why.keys()
            self._why.clear()
        return choices

    def _is_newer_than(self, choices: Sequence[CheckpointLocation] | None) -> bool:
        newest = max((candidate.id for candidate in self._why), default=None)
        return newest is not None and (choices is None or choices[0].id < newest)

    def _wait(self) -> None:
        assert self._end is not None
        if any(self._agreement.gather(time.monotonic() + PAUSE > self._end)):
            raise NoLoadableCheckpoint(
                f"{'; '.join(self._why.values())}. No older checkpoint is loaded in its place: all that is saved from "
                "then on would outrank this one. Start the job again when it can be read; or load another one by its "
                "path; or, to give this one up for good, remove it."
            )
        time.sleep(PAUSE)
