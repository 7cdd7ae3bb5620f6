"""The saves of one directory that were skipped, or can never be whole: what is logged of them."""

import logging
from collections import Counter
from collections.abc import Mapping

from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Hello
from fastckpt._core.preflight import several_directories

logger = logging.getLogger("fastckpt")

_SKIPPED = coded("saves are skipped from step %d on: %s", "FC-007")


class SkippedSaves:
    """Each reason is logged once, when it begins; the end of the job counts what no later checkpoint made up for.

    Attributes:
        reasons: How many saves were lost since a rank is gone, or has failed, by reason.
        last_was_skipped: Whether the save before was skipped: no warning is needed then.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.last_was_skipped = False
        self._newest = SaveId(0, 0)
        self._warned = False

    def lose(self, save: SaveId, why: str) -> None:
        """A save can never be whole, since a rank is gone, or has failed; it is counted once."""
        # Each rank that is missing reports the same save.
        if save <= self._newest:
            return
        self._newest = save
        if not self.reasons[why]:
            logger.warning(_SKIPPED, save.step, why)
        self.reasons[why] += 1

    def skip(self, save: SaveId, why: str) -> None:
        """A save found no slot."""
        if not self.last_was_skipped:
            logger.warning(_SKIPPED, save.step, why)

    def warn_of_mismatch(self, mismatch: str) -> None:
        """Ranks save different steps; logged once."""
        if not self._warned:
            self._warned = True
            logger.warning(coded("not every rank saves the same steps: %s", "FC-007"), mismatch)

    def report(self, kept: SaveId | None, directory: str) -> None:
        """At the end of the job: what was lost after the newest checkpoint, ``kept``."""
        for why, count in self.reasons.items() if kept is None or kept < self._newest else ():
            saves = "1 save was" if count == 1 else f"{count} saves were"
            text = coded("%s skipped, as %s: the newest checkpoint is %s in %s", "FC-007")
            logger.error(text, saves, why, kept or "none", directory)


def warn_of_several(hello: Hello, there: Mapping[str, Mapping[int, int]]) -> None:
    """Warn if the second rank that comes has another directory than the first.

    Args:
        hello: Of that rank.
        there: The ranks, among those of all nodes, that have come to each directory so far, by their local ranks.
    """
    here = {local: (rank, directory) for directory, ranks in there.items() for local, rank in ranks.items()}
    if len(here) == 1 and hello.local_rank not in here and hello.directory not in there:
        [first] = here.values()
        logger.warning(several_directories(*first, hello.rank, hello.directory))
