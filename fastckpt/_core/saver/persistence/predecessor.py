"""The job that saved to a place before: waits until it has left, or is dead."""

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from fastckpt._core.error_codes import coded
from fastckpt._core.memory.processes import Process
from fastckpt._core.saver.persistence.succession import Party, may_follow
from fastckpt._core.storage.history import Record
from fastckpt._core.storage.store import Store
from fastckpt.errors import PersistError, PlaceInUse

logger = logging.getLogger("fastckpt")

STALE = 20.0
"""Seconds without a renewal, by the reader's clock, after which its holder counts as dead."""
PATIENCE = 60.0
"""Seconds for which a job waits for another one that lives."""
PAUSE = 1.0
"""Seconds between two looks."""
LONGEST_LOOK = 5.0
"""Seconds from one answer to the next beyond which the place was silent: then nobody could renew a record either."""


@dataclass(frozen=True)
class Job:
    """Properties of a job that are the same for all places to which it saves.

    Attributes:
        launch: Unique id of the launch.
        location: Its checkpoint directory.
        take_over: True if it does not wait for others.
        exclusive: True if a place that cannot distinguish two jobs is refused.
        ended: Launches of this host with ended agents, as their memory shows, which this job owns now.
    """

    launch: str
    location: str
    take_over: bool = False
    exclusive: bool = True
    ended: set[str] = field(default_factory=set, compare=False)

    @property
    def party(self) -> Party:
        """This agent alone."""
        return Party(self.launch, self.location)


class Vigil:
    """Polls the holder of the newest history: others may follow when it has left, or is dead.

    Attributes:
        record: Record that was seen last.
        party: The round that may follow.
    """

    def __init__(self, store: Store, job: Job, party: Party) -> None:
        self.record: Record | None = None
        self.number, self.path, self.party = 0, store.path, party
        self._store, self._job = store, job
        self._since = self._answered = 0.0
        self._gone: Record | None = None

    def look(self) -> bool:
        """Return whether the history after the newest may be opened; blocks, and raises PersistError."""
        # `fresh` creates and removes a name there, so that no cached listing answers the first look.
        asked = time.monotonic()
        self.number = self._store.histories.newest(fresh=self.record is None)
        looked = time.monotonic()
        newest = self._store.histories.read(self.number) if self.number else None
        now = time.monotonic()
        # A holder that was found dead stays dead as long as its record is unchanged, however late the next look is.
        if newest is None or newest == self._gone or self._may_follow(newest):
            self.record = newest
            return True
        # A look that took long proves nothing: the holder could not write to a silent place, either.
        silent = max(now - looked, looked - (self._answered or asked)) > LONGEST_LOOK
        if newest != self.record or silent:
            self._since = looked
        self.record, self._answered = newest, now
        # Compared on this host's own clock: clocks of several hosts differ, and the record's time is never used.
        if looked - self._since >= STALE:
            why = "going on after %s: it has not renewed its record for %.0f s"
            logger.warning(why, describe(newest), now - self._since)
            self._gone = newest
            return True
        return False

    def _may_follow(self, record: Record) -> bool:
        if may_follow(self.party, record, has_died=has_died(record, self._job.ended)):
            return True
        if self._job.take_over:
            logger.warning("taking over %s from %s", self._store.path, describe(record))
        return self._job.take_over


def wait_for_predecessor(vigil: Vigil, end: threading.Event) -> None:
    """Wait until a history may be opened after the newest.

    Raises PlaceInUse if another job goes on to save there, PersistError if ``end`` is set meanwhile.
    """
    start, place, is_told = time.monotonic(), vigil.path, False
    while not vigil.look():
        assert vigil.record is not None
        whom = describe(vigil.record)
        if not is_told:
            text = coded("waiting, for up to %.0f s, for %s: it saves to %s, or has died", "FC-011")
            logger.warning(text, PATIENCE, whom, place)
            is_told = True
        if time.monotonic() - start > PATIENCE:
            raise PlaceInUse(
                coded(
                    f"{place} is in use by another job, which lives: {whom}. End that job, or give this one another "
                    "place; to take this one away from it, start with --fast-take-over.",
                    "FC-011",
                )
            )
        if end.wait(PAUSE):
            raise PersistError(f"the job ended while it waited for {whom}")


def has_died(record: Record, ended: Collection[str] = ()) -> bool:
    """Return whether its holder was a process of this host that has ended.

    Args:
        record: Record that it holds.
        ended: Launches with agents that are known to have ended: a restarted container has other pids, but an agent
            locked its memory until its end.
    """
    holder = Process.from_record(dict(record.holder))
    return record.launch in ended or (holder is not None and holder.is_dead())


def describe(record: Record) -> str:
    """The holder of a record in words."""
    process = Process.from_record(dict(record.holder)) or "a process that did not sign"
    return f"{process} (launch {record.launch or 'unknown'}, checkpoint directory {record.location or 'unknown'}, " + (
        f"history {record.history} since {record.since})"
    )
