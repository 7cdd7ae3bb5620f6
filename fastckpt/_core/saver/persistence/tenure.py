"""The right of this job to publish in one place: it holds the record of the newest history there.

A job waits until the job before has closed its record, or is dead. It opens the next history with its first save, and
renews its record as long as it lives. Of several nodes the first does so; all look, before they report a save. A job
that finds a newer history of others publishes no more: these are another job, or other nodes of this one that have
lost sight of it.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NoReturn

from fastckpt._core import metrics
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.processes import Process
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.saver.persistence.predecessor import Job, Vigil, describe, has_died, wait_for_predecessor
from fastckpt._core.saver.persistence.succession import is_continued, may_report, pause_before
from fastckpt._core.storage.history import Record
from fastckpt._core.storage.store import Store
from fastckpt.errors import ConfigError, FastckptError, PersistError, PlaceInUse, Superseded

logger = logging.getLogger("fastckpt")

RENEWAL = 5.0
"""Seconds after which a record is renewed."""
UNCHANGED = 2
"""Looks at a record that nobody renews, after which another member than its holder does."""
LAST = 5.0
"""Seconds that the end of a job waits for work under way."""


class Tenure:
    """This job's part in one place. Methods block, and may be called by several threads.

    Attributes:
        lost: Reason why this job may publish nothing more here; empty while it may.
        lost_to: The record of the job that took the place, if that is why.
        found: Checkpoint that became durable here between this job's look and its first save: the job has to start over
            from it.
    """

    def __init__(self, store: Store, job: Job, *, enabled: bool = True) -> None:
        """Take part in a place; ``enabled`` if histories are opened by this agent, not by that of another node."""
        self.lost = ""
        self.lost_to: Record | None = None
        self.found: SaveId | None = None
        self._store = store
        self._histories = store.histories
        self._job = job
        self._party = job.party
        self._enabled = enabled
        self._is_ours = False
        self._last: Record | None = None
        self._began = time.monotonic()
        self._vigil: Vigil | None = None
        self._unchanged = 0
        self._met = frozenset[str]()
        self._held: Record | None = None
        self._is_new = False
        self._looked = 0.0
        self._passed: int | None = None
        self._seen: SaveId | None = None
        # Held over requests to the place: the renewing thread and a persist must not open or look at the same time.
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self) -> int:
        """Wait until a history may be opened after the newest; returns the number of that, 0 for none.

        Raises:
            PlaceInUse: Another job saves there, and has not released it in time.
            PersistError: The place does not answer.
            ConfigError: It cannot distinguish two jobs.
        """
        if not self._histories.excludes:
            self._accept() if self._enabled else None
            return 0
        self._watch()
        if not self._enabled:
            return 0
        vigil = self._vigil = self._vigil or Vigil(self._store, self._job, self._party)
        if not self._is_ours:
            wait_for_predecessor(vigil, self._end)
        elif not vigil.look():  # other nodes of this job go on: no wait would end before they do
            assert vigil.record is not None
            self._lose_to(vigil.record)
        self._vigil, self._passed, self._last = None, vigil.number, vigil.record
        return vigil.number

    def begin_round(self, launches: Collection[str], first: str) -> None:
        """Take part in a new round of these agents, of which ``first`` opens histories; a lost place may be regained.

        It is only regained if `enter`, `hold` or `check` find that this round goes on after the present holders.
        """
        # Without the lock: a place that does not answer holds it, and a round need not wait for that.
        self._is_ours = self._is_ours or self._passed is not None
        self._party = replace(self._party, round=frozenset(launches), first=first)
        self._met |= self._party.round
        self._began = time.monotonic()
        if self._vigil is not None:  # a record that it saw while this agent waited counts for this round, too
            self._vigil.party = self._party
        if self.lost_to is not None:
            self._held = self._passed = None
            self.lost, self.lost_to = "", None

    def may_return(self) -> bool:
        """Return whether the job that took the place has left it, or is dead, by one more look, which blocks."""
        if self.lost_to is None:
            return not self.lost
        self._vigil = self._vigil or Vigil(self._store, self._job, self._party)
        if self._vigil.look():
            return True
        newest = self._vigil.record
        if newest is not None and newest.location == self._party.location:
            self.lost_to = newest  # for example, an agent that was started again there
        return False

    @property
    def ended_elsewhere(self) -> bool:
        """True if the job that took the place has ended well, as `may_return` has seen."""
        newest = self._vigil.record if self.lost_to and self._vigil else None
        return newest is not None and newest.finished and newest.location == self._party.location

    @property
    def awaited(self) -> Record | None:
        """The record that `enter` waits for, if its job saves for the same directory; None if it does not wait."""
        newest = vigil.record if (vigil := self._vigil) else None
        is_of_others = newest is not None and newest.location == self._party.location
        return newest if is_of_others and newest and not self._party.is_of_job(newest) else None

    def enable(self) -> int:
        """Hold histories from now on, in place of the node that was first before; as `enter`."""
        self._enabled = True
        return self.enter()

    def disable(self) -> None:
        """Leave the histories to come to the node that is first from now on."""
        self.step_down()
        self._enabled = False

    def take_from(self, launch: str) -> None:
        """Open a history in which nothing is saved, so that the job of that launch finds itself superseded.

        Nothing happens if a third one has done so; raises as `hold`.
        """
        if not self._enabled or not self._histories.excludes:
            return
        with self._lock:
            number = self._histories.newest()
            newest = self._histories.read(number) if number else None
            if newest and not newest.closed and newest.launch != launch and not has_died(newest, self._job.ended):
                return
            record = self._record(number + 1)
            if self._make(record):
                self._held, self._passed = record, record.history
                self._watch()

    def saw(self, newest: SaveId | None) -> None:
        """Note the newest checkpoint that was durable there before the workers chose one to resume."""
        self._seen = newest or SaveId(-1, -1)

    def reported(self, id: SaveId) -> None:
        """Note a durable checkpoint that this agent has reported: workers knew of it, or were there at the save."""
        self._seen = max(self._seen, id) if self._seen else id

    def _accept(self) -> None:
        """Go on without records; raises ConfigError if that was not asked for."""
        if self._job.exclusive:
            raise ConfigError(
                coded(
                    f"{self._store.path} offers no way to make something that one job alone can make, so two jobs that "
                    "save there cannot be told apart. Use a directory, s3://, gs:// or abfs:// with a current s3fs, "
                    "gcsfs or adlfs, or accept it with --fast-no-exclusive: then see to it that one job at a time "
                    "saves there.",
                    "FC-013",
                )
            )
        logger.warning(
            "%s cannot exclude a second job: make sure that only one job at a time saves there", self._store.path
        )
        self._enabled = False

    def hold(self, opening: Opening) -> None:
        """Hold the record of the history of a save that is to be published, or one that came later.

        Raises:
            Superseded: This job may publish nothing more here.
            PersistError: The place does not answer.
        """
        if self._enabled and self._histories.excludes:
            self._let_larger_halves_go_first(opening)
        with self._lock:
            self.demand()
            if self._enabled and (self._held is None or self._held.history < opening.id.history):
                self._open(opening)
            elif self._passed is not None and time.monotonic() - self._looked > RENEWAL:
                self._look()  # this process may not have been let run
            self._is_ours = True  # this job has waited for strangers: from now on others are other nodes
        # Outside the lock: a look through all checkpoints may take long, and the record must be renewed meanwhile.
        if self._is_new:
            self._look_behind(opening)
            self._is_new = False
            try:
                # Only now: before it held the record, files that another job was publishing looked like remains.
                self._store.sweep()
            except PersistError as error:
                logger.warning("%s", error)  # for example, no right to delete: saves can be written all the same

    def _let_larger_halves_go_first(self, opening: Opening) -> None:
        """Wait if this round is the smaller half of the last one: no save waits, and the record has not been made."""
        last = self._held or self._last
        if last is not None and last.history < opening.id.history:
            seconds = pause_before({*opening.members, self._job.launch}, last)
            if (left := self._began + seconds - time.monotonic()) > 0:
                self._end.wait(left)

    def _open(self, opening: Opening) -> None:
        # 1. wait for the predecessor, unless that was done   2. look for newer histories   3. create the record, or
        # find that another agent of this job has   4. renew it from now on   5. look again
        if self._passed is None:  # the place did not answer when the job began
            try:
                self.enter()
            except PlaceInUse as error:
                self._lose(str(error))
        history, newest = opening.id.history, self._look()
        if not self._enabled or newest >= history:
            return  # a save in a history that is over needs no record of its own
        record = self._record(history, token=opening.token, members=opening.members, parent=opening.parent)
        if not self._make(record):
            # The creation is exclusive: the loser reads the winner's record.
            there = self._histories.read(history) or Record(history)
            if not self._party.has_opened(there, opening.token):
                self._lose_to(there)
            record = there
        self._passed, self._last = history, record
        if record.launch != self._job.launch:
            return  # the agent of another node was first
        self._held, self._is_new = record, True
        self._watch()
        self._look()  # one that stood still for long may have made again a record that was removed since

    def _record(self, history: int, **opening: Any) -> Record:
        """The record by which this process opens a history."""
        job, holder = self._job, Process.current().to_record()
        return Record(history, launch=job.launch, location=job.location, holder=holder, **opening)

    def _watch(self) -> None:
        """Watch, from now on, whether another job takes the place of this one, and renew the record that is held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="fastckpt-history", daemon=True)
            self._thread.start()

    def _make(self, record: Record) -> bool:
        try:
            return self._histories.create(record)
        except ConfigError as error:
            if not self._job.exclusive:
                return True
            self._lose(str(error))

    def _look_behind(self, opening: Opening) -> None:
        """Start over if a save became durable since this job chose one to resume: its line must not end there."""
        if self._seen is None:
            return
        known, history = max(self._seen, opening.parent or self._seen), opening.id.history
        # Earlier saves of these very workers, in a history of the same line, may be on their way while this one opens.
        newer = {
            stored.id
            for stored in self._store.checkpoints()
            if known < stored.id and stored.id.history < history and not opening.is_of_line(stored.manifest.details)
        }
        for id in sorted(newer, reverse=True):
            whose = self._histories.read(id.history)
            if whose is None or not (opening.is_rollback and self._party.is_of_job(whose)):
                self.found = id
                self._lose(f"{id} became durable in {self._store.path} while this job began: it has to resume that one")

    def demand(self) -> None:
        """Raise Superseded if this job may publish nothing more, as far as it is known here."""
        if self.lost:
            raise Superseded(self.lost)

    def check(self, opening: Opening | None = None) -> bool:
        """See, after a save was published, that nobody else has opened a newer history; raises as `hold`.

        Returns whether the newest goes on from that save: one that a node published after others have resumed an older
        one is not reported.
        """
        with self._lock:
            self.demand()
            if self._enabled and self._passed is not None and (opening is None or not opening.members):
                self._look()
            elif opening is not None and opening.members and self._histories.excludes:
                return self._witness(opening)  # also where another node's agent opens histories
            return True

    def _witness(self, opening: Opening) -> bool:
        """See that the newest record is of the agent that opens histories for this round, or older."""
        number = self._histories.newest()
        self._looked = time.monotonic()
        newest = (self._histories.read(number) or Record(number)) if number else None
        if newest is not None and not may_report(self._party, opening.id, opening.token, newest):
            self._lose_to(newest)
        self._passed = max(self._passed or 0, number)
        return is_continued(opening.id, number, self._histories.read)

    def _look(self, *, fresh: bool = True) -> int:
        """The newest history, if nobody else has opened one since; raises Superseded."""
        newest = self._histories.newest(fresh=fresh)
        self._looked = time.monotonic()
        if newest > (self._passed or 0):
            record = self._histories.read(newest) or Record(newest)
            # A node that opens none may not have seen the last one of a round that it was in.
            is_ours = self._party.has_opened(record) or (not self._enabled and self._party.is_of_job(record))
            if not is_ours:
                self._lose_to(record)
            self._held, self._passed = None, newest  # an agent of this job has it, and renews it
        return newest

    def _lose_to(self, record: Record) -> NoReturn:
        self.lost_to = record
        metrics.event("superseded", place=str(self._store.path), history=record.history, holder=describe(record))
        others = "other nodes of this job" if self._knows(record) else "another job"
        self._lose(
            f"{self._store.path} has been taken by {others}, which opened history {record.history}: "
            f"{describe(record)}. This job publishes nothing more there; what it holds in memory stays"
        )

    def _knows(self, record: Record) -> bool:
        """Return whether it was opened by an agent that was in a round with this one."""
        return record.location == self._party.location and record.launch in self._met

    def _lose(self, why: str) -> NoReturn:
        self.lost = why = coded(why, "FC-012")
        logger.error("%s", why)
        raise Superseded(why)

    def start_over(self) -> SaveId | None:
        """The workers start over: the checkpoint that they have to resume, if that is why; None else."""
        with self._lock:
            found, self.found = self.found, None
            if found is not None:
                self.lost, self._seen = "", found
            return found

    def _keep(self) -> None:
        while not self._end.wait(RENEWAL):
            with self._lock, contextlib.suppress(FastckptError):  # a persist will report it
                self._renew()

    def _renew(self) -> None:
        if self._passed is None or (self.lost and not self.found):
            return
        newest = self._look(fresh=False)
        if self._held is None:
            self._stand_in(newest)
        else:
            self._held = self._held.renewed()
            try:
                # Every 5 s, so that a successor that looks for 20 s sees the record of a live job change.
                self._histories.write(self._held)
            except PersistError:
                if self._histories.read(self._held.history) is None:
                    self._held = None  # somebody has removed it: the next persist makes it again
                raise

    def _stand_in(self, newest: int) -> None:
        """Renew the record of this round if its holder has not for long: that may be lost, and the others go on."""
        record = self._histories.read(newest) if newest and newest == self._passed else None
        is_same = record is not None and self._last == record
        self._last, self._unchanged = record or self._last, self._unchanged + 1 if is_same else 0
        if record and self._unchanged >= UNCHANGED and not record.closed and self._party.is_of_job(record):
            self._histories.write(record.renewed())

    def stop(self) -> None:
        """End all waits for others."""
        self._end.set()

    def close(self, *, finished: bool = False) -> None:
        """Let others go on at once: this job has come to an orderly end, which is its good one if it has finished."""
        self.stop()
        self.step_down(finished=finished)
        if self._thread is not None:
            self._thread.join(LAST)

    def step_down(self, *, finished: bool = False) -> None:
        """Close the record that is held; saves that are still to come open further histories."""
        # A place that does not answer holds the lock: then others wait until the record counts as stale.
        if not self._lock.acquire(timeout=LAST):
            return
        try:
            if self._held is not None and not self.lost:
                self._histories.write(replace(self._held.renewed(), closed=True, finished=finished))
        except FastckptError as error:
            logger.warning("cannot record the end of this job, so the next job will wait for it: %s", error)
        finally:
            self._held = None
            self._lock.release()
