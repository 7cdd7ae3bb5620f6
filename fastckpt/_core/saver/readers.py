"""The workers that read checkpoints in memory: these stay while they are read, and go if they are bad."""

import logging
from pathlib import Path

from fastckpt._core.ipc.messages import Bad, Resumed
from fastckpt._core.saver.persistence.persist_job import PIN
from fastckpt._core.saver.persistence.persister import Persister
from fastckpt._core.saver.slot import READER, Slot
from fastckpt._core.storage.download_dir import remove_staging

logger = logging.getLogger("fastckpt")


class Readers:
    """Processes that read the slots of a node, and files that they downloaded for it.

    Attributes:
        active: Processes that read checkpoints in memory, or look for one to load.
        elsewhere: Checkpoints that an earlier launch left in a place in which this one does not look, in words.
    """

    def __init__(self, slots: list[Slot], staging: Path, persister: Persister, *, flush: bool) -> None:
        """Remove files that the readers of a dead job left in ``staging``."""
        self._persister, self._flush = persister, flush
        self._slots = slots
        self._staging = staging
        self.active: set[int] = set()
        self.elsewhere: list[str] = []
        remove_staging(staging)

    def pin(self, pid: int) -> list[str]:
        """Keep every whole checkpoint as it is while the process reads; their paths, newest first."""
        self.active.add(pid)
        whole = sorted((slot for slot in self._slots if slot.committed), key=lambda s: s.id or (), reverse=True)
        # All of them: while ranks vote, an older checkpoint may become the one to load.
        for slot in whole:
            slot.pins[f"{READER}{pid}"] = f"step {slot.id.step if slot.id else 0} is being loaded by process {pid}"
        return [str(slot.path) for slot in whole]

    def verified(self) -> list[str]:
        """Slots that were read and compared with their digests since their writers died."""
        return [str(slot.path) for slot in self._slots if slot.committed and slot.verified]

    def release(self, pid: int) -> None:
        """The process reads no more."""
        self.active.discard(pid)
        for slot in self._slots:
            slot.pins.pop(f"{READER}{pid}", None)

    def give_up(self, bad: Bad) -> None:
        """Never offer these checkpoints again, nor persist them: they are damaged, or their state is wrong."""
        for slot in self._slots:
            if _is_in(bad.memory, slot):
                # Lost first, cleared second: the reason names the id, which `clear` forgets.
                if not bad.distrusted:
                    slot.lose("the ranks could not verify it")
                slot.clear()

    def resumed(self, message: Resumed) -> None:
        """Note the checkpoint that the readers resume: of several nodes, the newest that all have.

        Newer ones here are given up, unless they are being persisted; then the newest that is left is flushed.
        """
        self._persister.stats.resume(message.tier, message.bad)
        for slot in self._slots:
            if _is_in(message.abandoned, slot) and not any(pin.startswith(PIN) for pin in slot.pins):
                logger.info("discarding %s in memory: not all nodes have saved it", slot.id)
                slot.clear()
        left = [slot for slot in self._slots if slot.committed and not _is_in(message.abandoned, slot)]
        newest = max(left, key=lambda slot: slot.id or (), default=None)
        if message.abandoned and newest and self._flush and (newest.id or ()) > (self._persister.durable or ()):
            self._persister.submit(newest)

    def lost(self) -> list[str]:
        """Return the saves in memory that were found bad, with reasons, and checkpoints in places where nobody looks.

        A slot is left out once something was saved in it again.
        """
        return [slot.lost for slot in self._slots if slot.lost] + self.elsewhere

    def close(self) -> None:
        """Remove the downloads: nobody reads any more."""
        remove_staging(self._staging)


def _is_in(ids: list[list[int]], slot: Slot) -> bool:
    return slot.id is not None and list(slot.id) in ids
