"""The save that is to be persisted next, unless a newer one overtakes it: no slot is pinned while it waits."""

import asyncio
import enum
from collections.abc import Callable

from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Committed
from fastckpt._core.saver.stats import SaverStats


class Urgency(enum.IntEnum):
    """Fate of a save for storage while another is persisted: a newer one overtakes it, or it keeps its slot."""

    OVERTAKABLE = 0
    AGREED = 1
    """Urgency as OVERTAKABLE; but if no other save is persisted, all nodes persist this one at once."""
    LASTING = 2


def urgency_of(message: Committed) -> Urgency:
    """Return the urgency that a writer asks for when it wants a save to be persisted."""
    if not message.overtakable:
        return Urgency.LASTING
    return Urgency.AGREED if message.agreed else Urgency.OVERTAKABLE


QUIET = 1.0
"""Seconds without a save after which each of several nodes persists its newest: they hold the same one by then."""


class PendingPersist:
    """Persist that waits, at most one: of the newest save that was made without a storage type.

    A node alone persists the newest checkpoint in its memory as soon as no other persist is under way. Several nodes
    would choose different ones, and none would become whole. So each persists at once only saves that all have agreed
    on (`_core/schedule/persist_turns.py`), and otherwise waits until nothing was saved for a while.

    Args:
        pay: Persists the newest checkpoint in memory, if it is as new as the pending one; none is pending then.
        is_busy: Returns whether a persist is under way.

    Attributes:
        save: The one that waits; None for none.
        alone: True if this node is the only one.
    """

    def __init__(self, stats: SaverStats, pay: Callable[[], None], is_busy: Callable[[], bool], *, alone: bool) -> None:
        self.save: SaveId | None = None
        self._stats, self._pay, self._is_busy, self.alone = stats, pay, is_busy, alone
        self._timer: asyncio.TimerHandle | None = None

    def want(self, save: SaveId, *, agreed: bool) -> None:
        """A save is to be persisted unless a newer one is; ``agreed`` if all nodes persist it."""
        if self.save is not None and self.save < save:
            self._stats.overtaken += 1
        self.save = max(save, self.save or save)
        # All nodes have this save and agreed on it: no pause is needed to let them settle on one.
        if agreed and not self._is_busy():
            self._pay()
        self.look()

    def look(self) -> None:
        """Something was saved, or a persist has ended: start the pending persist, now or once nothing more is saved."""
        self._stop()
        if self.save is None or self._is_busy():
            return
        if self.alone:
            self._pay()
        else:
            self._timer = asyncio.get_running_loop().call_later(QUIET, self._settle)

    def _settle(self) -> None:
        if not self._is_busy():  # else its end is the time to look again: a slot that is pinned may not wait
            self._pay()

    def hurry(self) -> None:
        """The job ends: nothing more is saved, and the pending persist starts as soon as it can."""
        # No newer save will come, so the newest in memory is the one, on every node.
        self.alone = True
        self.look()

    def paid(self, save: SaveId) -> None:
        """A save is being persisted: the pending persist is dropped, or stays pending if it is newer."""
        if self.save is not None and self.save <= save:
            self._stats.overtaken += self.save < save
            self.forget()

    def forget(self) -> None:
        """Drop the pending persist."""
        self.save = None
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
