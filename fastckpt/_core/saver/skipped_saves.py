"""The saves of one directory that were skipped, or can never be whole, and their log lines."""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping

from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Hello
from fastckpt._core.policy.slots import Skip, SkipKind
from fastckpt._core.preflight import several_directories
from fastckpt._core.saver.writers import ENDED

logger = logging.getLogger("fastckpt")

_SKIPPED = coded("saves are skipped from step %d on: %s", "FC-007")
_PATIENCE = 5.0
"""Seconds without a log line on a rank that is late, or has ended: if it failed, the launcher reports why."""
_SLOT = "no slot"


class SkippedSaves:
    """Logs each reason once, when it is certain; the end of the job counts saves without any later checkpoint.

    Attributes:
        reasons: Number of saves lost because a rank is gone, or has failed, by reason.
        last_was_skipped: True if the save before was skipped: no warning is needed then.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.last_was_skipped = False
        self._newest = SaveId(0, 0)
        self._since: dict[str, tuple[SaveId, float]] = {}
        self._warned = False

    def begin(self) -> None:
        """Others have come in place of ranks that were gone."""
        self.reasons.clear()
        self._since.clear()
        self.last_was_skipped = False

    def lose(self, save: SaveId, why: str) -> None:
        """A save can never be whole, since a rank is gone, or has failed; it is counted once."""
        # Each rank that is missing reports the same save.
        if save <= self._newest:
            return
        self._newest = save
        self.reasons[why] += 1
        self._log(why, save, why, is_certain=not why.endswith(ENDED))

    def skip(self, save: SaveId, skip: Skip) -> None:
        """A save found no slot."""
        if not self.last_was_skipped:
            self._since.pop(_SLOT, None)
        self._log(_SLOT, save, skip.reason, is_certain=skip.kind is not SkipKind.LATE)

    def _log(self, what: str, save: SaveId, why: str, *, is_certain: bool) -> None:
        """Log it once: at once if the reason is certain, else when it has lasted."""
        now = time.monotonic()
        first, since = self._since.setdefault(what, (save, now))
        if since < math.inf and (is_certain or now - since > _PATIENCE):
            logger.warning(_SKIPPED, first.step, why)
            self._since[what] = first, math.inf

    def warn_of_mismatch(self, mismatch: str) -> None:
        """Ranks save different steps; logged once."""
        if not self._warned:
            self._warned = True
            logger.warning(coded("not every rank saves the same steps: %s", "FC-007"), mismatch)

    def report(self, kept: SaveId | None, directory: str) -> None:
        """Report, at the end of the job, the saves that were lost after the newest checkpoint, ``kept``."""
        for why, count in self.reasons.items() if kept is None or kept < self._newest else ():
            saves = "1 save was" if count == 1 else f"{count} saves were"
            text = coded("%s skipped, as %s: the newest checkpoint is %s in %s", "FC-007")
            logger.error(text, saves, why, kept or "none", directory)


def warn_of_several(hello: Hello, there: Mapping[str, Mapping[int, int]]) -> None:
    """Warn if the second rank that comes has another directory than the first.

    Args:
        hello: Of that rank.
        there: The global ranks that have come to each directory so far, by their local ranks.
    """
    here = {local: (rank, directory) for directory, ranks in there.items() for local, rank in ranks.items()}
    if len(here) == 1 and hello.local_rank not in here and hello.directory not in there:
        [first] = here.values()
        logger.warning(several_directories(*first, hello.rank, hello.directory))
