"""The job that saved to a place before: waits until it has left, or is dead."""

import logging
import threading
import time
from dataclasses import dataclass

from fastckpt._core.memory.processes import Process
from fastckpt._core.storage.history import Record
from fastckpt._core.storage.store import Store
from fastckpt.errors import PersistError, PlaceInUse

logger = logging.getLogger("fastckpt")

STALE = 20.0
"""Seconds without a renewal, by the clock of who looks, after which its holder counts as dead."""
PATIENCE = 60.0
"""Seconds for which a job waits for another one that lives."""
PAUSE = 1.0
"""Seconds between two looks."""
LONGEST_LOOK = 5.0
"""Seconds from one answer to the next beyond which the place was silent: then nobody could renew a record either."""


@dataclass(frozen=True)
class Job:
    """What is the same for all places to which a job saves.

    Attributes:
        launch: What no other launch is called.
        location: Its checkpoint directory.
        take_over: Whether it waits for nobody.
        exclusive: Whether a place that cannot distinguish two jobs is refused.
    """

    launch: str
    location: str
    take_over: bool = False
    exclusive: bool = True

    def owns(self, record: Record) -> bool:
        """Whether a history was opened by an agent of this job."""
        same = self.launch == record.launch or self.launch in record.members
        return same and record.location == self.location


def wait_for_predecessor(store: Store, job: Job, end: threading.Event) -> int:
    """Wait until a history may be opened after those that are there; the number of the newest, 0 for none.

    Raises PlaceInUse if another job goes on to save there, PersistError if ``end`` is set meanwhile.
    """
    start = since = answered = time.monotonic()
    last: Record | None = None
    while True:
        # `fresh` creates and removes a name there, so that no cached listing answers the first look.
        number, asked = store.histories.newest(fresh=last is None), time.monotonic()
        newest = store.histories.read(number) if number else None
        now = time.monotonic()
        if newest is None or _may_follow(store, job, newest):
            return number
        if last is None:
            logger.warning(
                "waiting, for up to %.0f s, for %s: it saves to %s, or has died",
                PATIENCE,
                describe(newest),
                store.path,
            )
        # A look that took long proves nothing: the holder could not write to a silent place, either.
        if newest != last or max(now - asked, asked - answered) > LONGEST_LOOK:
            last, since = newest, asked
        answered = now
        # Compared on this host's own clock: clocks of several hosts differ, and the record's time is never used.
        if asked - since >= STALE:
            logger.warning("going on after %s: it has not renewed its record for %.0f s", describe(newest), now - since)
            return number
        if now - start > PATIENCE:
            raise PlaceInUse(
                f"{store.path} is in use by another job, which lives: {describe(newest)}. End that job, or give "
                "this one another place; to take this one away from it, start with --fast-take-over."
            )
        if end.wait(PAUSE):
            raise PersistError(f"the job ended while it waited for {describe(newest)}")


def _may_follow(store: Store, job: Job, record: Record) -> bool:
    """Whether the history after this one may be opened at once."""
    if record.closed or job.owns(record) or has_died(record):
        return True
    if job.take_over:
        logger.warning("taking over %s from %s", store.path, describe(record))
    return job.take_over


def has_died(record: Record) -> bool:
    """Whether its holder was a process of this host, and is no more."""
    holder = Process.from_record(dict(record.holder))
    # A pid is only comparable on the same host, boot and pid namespace.
    return holder is not None and holder.is_here() and not holder.is_alive()


def describe(record: Record) -> str:
    """The holder of a record in words."""
    process = Process.from_record(dict(record.holder)) or "a process that did not sign"
    return f"{process} (launch {record.launch or 'unknown'}, checkpoint directory {record.location or 'unknown'}, " + (
        f"history {record.history} since {record.since})"
    )
