"""Ranks of several nodes that have closed before the others, as announced in the store of the process group."""

import contextlib
import hashlib
import json
from collections.abc import Sequence

import torch.distributed as dist

from fastckpt._core.client.job_store import job_store_if_met
from fastckpt._core.client.mailbox import StoreMailbox
from fastckpt._core.config import RankInfo
from fastckpt._core.format.ids import SaveId


class Departures:
    """Ranks of several nodes that have closed and lend nothing, of one checkpoint directory.

    They announce it in the store that formed the process group: one message for all of them. On one node the saver
    knows by itself; before a load, which several nodes need to save, there are none.
    """

    def __init__(self, directory: str, place: RankInfo) -> None:
        self._key = hashlib.sha256(directory.encode()).hexdigest()[:16]
        self._place = place
        self._found: dict[int, Sequence[int]] = {}

    def announce(self, history: int, last: SaveId | None) -> None:
        """Announce that this rank has closed after its last save; the first announcement counts."""
        if (mailbox := self._mailbox()) is None:
            return
        word = [self._place.rank, *(last or SaveId(history, 0))]
        with contextlib.suppress(dist.DistError, RuntimeError):  # the others have ended, and the store with them
            mailbox.put_word(f"{history}", json.dumps(word))

    def found(self, history: int) -> Sequence[int]:
        """Rank, history and step of the last save of one that has closed; empty while none has.

        One question to the store for each save, from the first rank of each node alone.
        """
        if history in self._found or self._place.local_rank or (mailbox := self._mailbox()) is None:
            return self._found.get(history, ())
        with contextlib.suppress(dist.DistError, RuntimeError):
            if word := mailbox.word(f"{history}"):
                self._found = {history: json.loads(word)}
        return self._found.get(history, ())

    def _mailbox(self) -> StoreMailbox | None:
        store = job_store_if_met(f"closed/{self._key}")
        return None if store is None else StoreMailbox(store)
