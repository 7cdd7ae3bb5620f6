"""The choice of saves that several nodes persist, alike on all of them, where newer ones may replace older ones."""

import contextlib
import hashlib
import time
from collections.abc import Callable

import torch.distributed as dist

from fastckpt._core.client.job_store import job_store_if_met
from fastckpt._core.config import RankInfo
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Status
from fastckpt.errors import FastckptError

MOST_AHEAD = 64
"""Saves between the first rank's announcement and the one that is persisted, at most; at first there are none."""
PATIENCE = 60.0
"""Seconds, at first, to wait for a checkpoint of which nodes have not written their parts."""

_NEXT = "next"


class PersistTurns:
    """Decides which saves without a storage type are persisted, alike on all of several nodes.

    When no persist is under way, the first rank sets in the store of the process group the step from which on the next
    save is to be persisted: the one after its own. The collectives of a step come between two saves, so no rank reaches
    that save before it was set. The first rank of each node asks the store in each save. If nodes drift apart, and some
    have missed it, the next one is set more saves ahead.

    Args:
        directory: The checkpoint directory.
        place: The place of this rank.
        status: Asks this node's saver for the progress of persists.
    """

    def __init__(self, directory: str, place: RankInfo, status: Callable[[], Status]) -> None:
        self._key = hashlib.sha256(directory.encode()).hexdigest()[:16]
        self._place, self._status = place, status
        self._ahead, self._patience, self._since = 0, PATIENCE, 0.0
        self._begin(0)

    def _begin(self, history: int) -> None:
        self._history, self._last, self._next, self._is_set = history, -1, -1, False

    def comes(self, save: SaveId) -> bool:
        """Return whether all nodes persist this save; to be called for each without a storage type."""
        # Of several nodes the first rank of each asks for all of its ranks.
        if self._place.local_rank:
            return False
        if (store := job_store_if_met(f"turns/{self._key}/{save.history}")) is None:
            return False
        if save.history != self._history:
            self._begin(save.history)
        before, self._last = self._last, save.step
        with contextlib.suppress(dist.DistError, RuntimeError):  # the others have ended, and the store with them
            if self._place.rank:
                self._receive(store)
            # Only after the agreed save has passed: setting another
            # earlier could be read by some nodes and not by others.
            elif before >= self._next:
                self._send(store, save.step, max(1, save.step - before))
        # The step itself may be one that this job leaves out: then the first save after it is the one.
        return before < self._next <= save.step

    def _receive(self, store: "dist.distributed_c10d.Store") -> None:
        self._is_set = self._is_set or store.check([_NEXT])
        if self._is_set:
            self._next = int(store.get(_NEXT))

    def _send(self, store: "dist.distributed_c10d.Store", step: int, stride: int) -> None:
        """Unless a persist is under way, set the step from which on the next save is persisted."""
        with contextlib.suppress(FastckptError):  # the saver is gone, or in trouble
            if self._status().persists:
                # A persist that stays unfinished for so long was probably
                # missed by some node: agree again, with more distance.
                if time.monotonic() < self._since + self._patience:
                    return
                self._ahead, self._patience = min(2 * self._ahead + 1, MOST_AHEAD), 2 * self._patience
            self._next, self._since = step + self._ahead * stride + 1, time.monotonic()
            store.set(_NEXT, str(self._next))
