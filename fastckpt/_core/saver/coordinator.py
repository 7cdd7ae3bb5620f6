"""Coordinator of one checkpoint directory: the slot that a save takes, commits, and pins."""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from threading import Event

from fastckpt._core import metrics
from fastckpt._core.config import Settings, trial_record
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.copier import Copier
from fastckpt._core.ipc.messages import (
    Bad,
    BeginSave,
    Committed,
    Fetch,
    Fetched,
    Goodbye,
    Granted,
    Hello,
    Skipped,
    Status,
    Uncommitted,
)
from fastckpt._core.memory import loans, slots
from fastckpt._core.memory.presence import forget_the_dead
from fastckpt._core.policy.slots import Skip, SkipKind, choose_slot
from fastckpt._core.saver.admission import admit, demand_empty
from fastckpt._core.saver.arena_location import arena_of, copies_place, left_elsewhere, report_memory_of_others
from fastckpt._core.saver.memory_digests import MemoryDigests
from fastckpt._core.saver.peers.agent_peers import AgentPeers
from fastckpt._core.saver.peers.memory_peers import MemoryPeers
from fastckpt._core.saver.peers.peer_round import PeerRound
from fastckpt._core.saver.persistence.directory_mark import DirectoryMark
from fastckpt._core.saver.persistence.durable_tiers import DurableTiers
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.saver.persistence.pending_persist import urgency_of
from fastckpt._core.saver.persistence.persist_job import PIN
from fastckpt._core.saver.persistence.predecessor import Job
from fastckpt._core.saver.persistence.succession import is_of_another_line
from fastckpt._core.saver.readers import Readers
from fastckpt._core.saver.reservation import Reservations
from fastckpt._core.saver.skipped_saves import SkippedSaves
from fastckpt._core.saver.slot import Slot
from fastckpt._core.saver.stats import SaverStats
from fastckpt._core.saver.worker_progress import WorkerProgress
from fastckpt._core.saver.writers import CLOSED, Loan, Writers
from fastckpt._core.storage.download_dir import staging_path
from fastckpt.errors import ArenaInUse, FastckptError

logger = logging.getLogger("fastckpt")

ORPHANS_DEADLINE = 10.0
"""Seconds that killed writers of a dead owner have to be gone before its memory counts as lost."""
DECISIONS = 64
"""Number of decisions on saves that are remembered, for writers that are behind."""


class Coordinator:
    """One checkpoint directory on this node. All methods but the first run in the saver's event loop."""

    def __init__(
        self,
        hello: Hello,
        settings: Settings,
        copier: Copier,
        launch: str,
        ending: Event,
        agent_slot: int,
        among: AgentPeers,
    ) -> None:
        """Make or adopt the arena, for which it may have to wait until ``ending`` is set; raises as `admit`."""
        if record := trial_record():
            demand_empty(hello.directory, Path(record))  # before anything is opened there
        self._settings, self._directory = settings, hello.directory
        job = Job(launch, hello.directory, settings.take_over, settings.exclusive)
        self.tiers = DurableTiers(hello, self.newest, copier, job)
        self.persister = self.tiers.persister
        self.agent_slot = agent_slot
        copies = copies_place(settings, hello.directory)
        path = arena_of(settings, hello.directory, agent_slot)
        self.arena = admit(path, job, self.persister.tenure, ending)
        self.slots: list[Slot] = []
        self.progress = WorkerProgress(path, hello.local_world_size)
        self.readers = Readers(self.slots, staging_path(path), self.persister, flush=settings.flush)
        self._marking = DirectoryMark(self.arena, self.persister.storage, hello.directory, first=hello.group_rank == 0)
        self.digester = MemoryDigests(self.newest)
        self.writers = Writers(hello.local_world_size)
        readers = self.readers.active
        self.peers = MemoryPeers(hello.directory, path, self.slots, among, settings, readers, copies)
        self._reservations = Reservations(self.arena, self.slots, self.newest, self.peers.room)
        self._among = among
        self._decisions: dict[SaveId, Slot | Skip] = {}
        self._skipped = SkippedSaves()
        self._borrowed_from: set[int] = set()
        self._ended = self._is_back = False

    async def open(self) -> None:
        """Read the saves in memory and on storage."""
        # 1. end the writers of a dead owner   2. adopt or give up its memory, by the directory's mark   3. take the
        # whole saves in its slots   4. look in the durable tiers, and wait for other jobs there   5. begin to digest,
        # and look for saves left elsewhere
        loop = asyncio.get_running_loop()
        if self._among.round is not None:
            await self.begin_round(self._among.round)
        with metrics.phase("arena.adopt"):
            alone = await loop.run_in_executor(None, self.arena.evict_writers, ORPHANS_DEADLINE)
        if not alone:
            text = coded("writers of an earlier job still use %s: its memory is not resumed", "FC-004")
            logger.warning(text, self.arena.path)
        await self._marking.settle(alone=alone, of_others=self._among.mark_of(self._directory))
        loans.forget(self.arena.path)
        await loop.run_in_executor(None, self.peers.clear_away)
        self.arena.make_slots(self._settings.slots)
        self.slots += [Slot(path) for path in self.arena.slots]
        for slot in self.slots:
            slot.recover()
        # Before `tiers.open`: a save of another line in memory must not count as the newest checkpoint known.
        await loop.run_in_executor(None, self._forget_others)
        in_memory = max((slot.id for slot in self.slots if slot.id), default=None)
        self.writers.newest_history = await self.tiers.open(in_memory)
        self.digester.look()
        if not self.arena.adopted:
            report_memory_of_others(self.arena.path)
        known = max((save for save in (in_memory, self.tiers.newest) if save), default=None)
        where = self.arena.path, self._directory
        self.readers.elsewhere = await loop.run_in_executor(None, left_elsewhere, self._settings, *where, known)

    async def begin_round(self, round: PeerRound) -> None:
        """Take part in a new round of agents, before there are workers."""
        if (prefetch := self._among.prefetch) is not None:
            await asyncio.to_thread(prefetch.hand_over, self._directory, self.arena.path, self.peers.replicas.lock)
        self.peers.assume(round)
        self._is_back = self._is_back or self.tiers.lost_to is not None
        await asyncio.to_thread(self.tiers.begin_round, round.launches, round.launches[0])

    async def assume(self, hello: Hello) -> None:
        """Take this node's part in a new round, of which this is a first hello; raises as `open`."""
        if not self.writers.is_new:
            return
        if self._is_back:
            self._is_back = False
            await asyncio.to_thread(self._forget_others, lost=True)
        history = await self.tiers.assume(hello)
        self.writers.newest_history = max(self.writers.newest_history, history)
        self._marking.assume(first=hello.group_rank == 0)

    def _forget_others(self, *, lost: bool = False) -> None:
        """Give up saves in memory from which the histories that others have opened do not go on."""
        histories = self.persister.storage.histories
        for slot in self.slots:
            opening = Opening.of_slot(slot.path)
            record = histories.read(opening.id.history) if opening else None
            if opening and is_of_another_line(opening, record, histories.newest, lost=lost):
                logger.warning("discarding %s in %s: another job has opened its history", opening.id, slot.path)
                slot.clear()

    def bytes(self) -> int:
        """Bytes of slots, and of copies for other nodes; in any thread."""
        sizes = [sum(slots.images_in(slot.path).values()) for slot in [*self.slots]]
        return sum(sizes) + self.peers.replicas.bytes()

    def stats(self) -> SaverStats:
        """Return the outcome of the checkpoints; in any thread."""
        stats = self.persister.stats
        stats.replicas = self.peers.counts
        stats.memory = max(filter(None, (slot.whole for slot in [*self.slots])), default=None)
        return stats

    def newest(self) -> Slot | None:
        """The slot with the newest whole checkpoint; None if memory holds none."""
        return max((slot for slot in self.slots if slot.committed), key=lambda slot: slot.id or (), default=None)

    def join(self, hello: Hello, pid: int) -> int:
        """Register a writer; returns the history that it writes. Raises FastckptError if it has a checkpointer here."""
        if self.writers.is_new:
            self._skipped.begin()
            self._borrowed_from.clear()
        history = self.writers.join(hello.local_rank, pid, hello.rank)
        try:
            self.tiers.join(hello)
        except FastckptError:
            # A refused writer is no member: else each save would wait for its part.
            self.writers.lose(hello.local_rank, pid)
            raise
        self.digester.enabled = hello.verify != "never"
        return history

    def lost(self, local_rank: int, pid: int) -> None:
        """A writer has disconnected or died: it reads no more, and saves that wait for it will not be whole."""
        self.readers.release(pid)
        if self.writers.lose(local_rank, pid):
            self._settle(local_rank)

    def leave(self, local_rank: int, message: Goodbye) -> None:
        """A writer deregisters: saves that wait for it take its lent state, or will not be whole."""
        self._note_deregistered_elsewhere(message.closed)
        loan = Loan(message.lends, message.details) if message.lends else None
        self.writers.leave(local_rank, message.history, loan)
        self._settle(local_rank)

    def _settle(self, gone: int) -> None:
        """Lend the state of a writer that is gone to the saves under way; give up saves to which it lends nothing."""
        # Oldest first, so that a lender's part goes into the older save before the newer one needs it, too.
        for slot in sorted(self.slots, key=lambda slot: slot.id or ()) if self.arena.is_there() else ():
            if slot.id is None or slot.committed or gone not in slot.writers - slot.done:
                continue
            slot.read_part(gone)  # it may have finished a part that it could not report any more
            try:
                if gone not in slot.done:
                    self._lend(slot, slot.id, gone)
            except OSError as error:
                logger.warning("%s cannot take over the part of rank %d, which has left: %s", slot.id, gone, error)
            self._take(slot, partial(slot.read_part, gone))

    def _lend(self, slot: Slot, save: SaveId, to_lend: int | None = None) -> None:
        """Complete a save with the lent state of writers that are gone, or of one of them."""
        if self._reservations.may_change(slot):
            return  # the writer that waits for this reservation lends afterwards
        for rank, loan in self.writers.lenders(save):
            if to_lend in (None, rank) and rank not in slot.done:
                self._reservations.note(slot, dict(loan.files), rank)
                try:
                    loans.borrow(self.arena.path, slot.path, loan.files)
                except OSError:
                    self.writers.withdraw(rank)
                    raise
                slots.commit(slot.path, rank, slots.SlotDone(save, dict(loan.files), dict(loan.details)))
                slot.read_part(rank)
                self._report_loan(save, rank)

    def _lend_late(self, slot: Slot, save: SaveId) -> None:
        """Complete a save whose slot was being reserved, in the background, when it began or a writer left."""
        try:
            if slot.id == save and not slot.committed:
                self._lend(slot, save)
        except OSError as error:
            logger.warning("%s cannot take over parts of ranks that have left: %s", save, error)

    def _report_loan(self, save: SaveId, rank: int) -> None:
        """Log, once for each rank, the first save that takes its lent state."""
        if rank not in self._borrowed_from:
            self._borrowed_from.add(rank)
            text = "from step %d on checkpoints have the part of %s as it was when that closed"
            logger.warning(text, save.step, self.writers.name(rank))

    def _lose(self, save: SaveId, why: str) -> None:
        """A save can never be whole, since a rank is gone, or has failed."""
        newest = self.newest()
        if newest is None or newest.id is None or save > newest.id:  # else it is of a rank that is late
            self._skipped.lose(save, why)

    def _note_deregistered_elsewhere(self, closed: list[int]) -> None:
        if len(closed) == 3 and self.writers.elsewhere is None:
            self.writers.elsewhere = closed[0], SaveId(*closed[1:])
            self.persister.give_up_after(SaveId(*closed[1:]), f"rank {closed[0]} has closed")

    def is_copying(self, dead: Collection[int]) -> bool:
        """Return whether a save becomes whole once the ranks that are here, without the ``dead``, have copied it."""
        return any(
            slot.id is not None
            and not slot.committed
            and all(rank not in dead and self.writers.is_inside(rank, slot.id) for rank in slot.writers - slot.done)
            for slot in self.slots
        )

    def look(self) -> None:
        """Read all records: a writer may have died before it reported its last save, or its message be on its way."""
        self._read(*self.slots)

    def awaits(self, writers: Collection[int]) -> bool:
        """Return whether a save lacks only parts of these writers, and none of these has gone on to a later one."""
        latest = self.writers.latest
        lacking = [(slot.id, slot.writers - slot.done) for slot in self.slots if slot.id and not slot.committed]
        return any(
            all(writer in writers and latest.get(writer, save) <= save for writer in missing)
            for save, missing in lacking
        )

    def restart(self) -> None:
        """All workers are dead and reaped: read the records, pin the newest checkpoint and flush it."""
        # 1. read all records: messages of dead workers may be lost   2. drop the
        # pins of dead readers, keep those of persists   3. give up saves that another
        # job has superseded   4. forget the generation of writers   5. flush the newest
        self._read(*self.slots)
        for slot in self.slots if self.arena.is_there() else ():
            # A persist that was under way when the workers died still reads the slot.
            pins = {name: why for name, why in slot.pins.items() if name.startswith(PIN)}
            slot.recover()
            slot.pins.update(pins)
        if (found := self.tiers.start_over()) is not None:
            for slot in self.slots:
                if slot.id is not None:
                    logger.warning("discarding %s in %s: the job resumes the durable %s", slot.id, slot.path, found)
                    slot.drop()
        self.progress.log()
        forget_the_dead(self.arena.path)
        loans.forget(self.arena.path)
        self.writers.restart()
        self._decisions.clear()
        self._reservations.look_again()
        self.flush()
        self.digester.look()

    def flush(self, *, ends: bool = False) -> None:
        """Persist the newest checkpoint in memory if storage has none as new, and the settings let us.

        If the job ``ends`` on several nodes at once, each may have come a save further than another, and a save that
        some lack is never published. So saves that all nodes keep, or are about to, are persisted first.
        """
        shared = self.peers.common
        if shared or not self.peers.address:  # else the first agent has ended, and its last answer holds
            self.persister.stats.common = min(shared, default=None)
        if not self._settings.flush:
            return
        kept = [slot for slot in self.slots if slot.committed and slot.id in shared] if ends else []
        for slot in sorted(kept, key=lambda slot: slot.id or ()):
            self.persister.flush(slot, overtaken=False)
        if (newest := self.newest()) is not None:
            self.persister.flush(newest)

    def persist(self, save: SaveId) -> str:
        """Persist a checkpoint in memory that a user asks for; the outcome, as in `Saver.persist`."""
        slot = next((slot for slot in self.slots if slot.committed and slot.id == save), None)
        if slot is None:
            return "gone"
        return "begun" if self.persister.request(slot) else "known"

    async def begin(self, writer: int, message: BeginSave) -> Granted | Skipped:
        """Choose a slot for a save, once for all writers, and again for one that asks again; raises ArenaTooSmall."""
        save = SaveId(message.history, message.step)
        self._note_deregistered_elsewhere(message.closed)
        again = self.writers.begin(writer, save)
        # One decision for each id: the first rank's message makes it, and all others get the same answer.
        known = self._decisions.get(save)
        # A rank that asks for the same save again was skipped before: a slot may be free by now.
        decision = self._decide(save) if known is None or (again and isinstance(known, Skip)) else known
        persisted, trouble = self.news(writer), self.tiers.trouble
        if isinstance(decision, Slot) and (mismatch := self.writers.out_of_step(writer, save)):
            self._skipped.warn_of_mismatch(mismatch)
            return Skipped(mismatch, persisted, trouble)
        if isinstance(decision, Slot) and decision.id == save and writer in decision.done:
            return Skipped("memory already holds this step", persisted, trouble)
        if isinstance(decision, Slot) and decision.id == save:
            await self._reservations.reserve(decision, message.files, writer)
            self._lend_late(decision, save)
            # In the background: the next save goes to another slot, and finds its memory reserved.
            self._reservations.reserve_ahead(message.files, writer)
            return Granted(str(decision.path), persisted, trouble)
        reason = decision.reason if isinstance(decision, Skip) else "a newer step has taken its slot"
        return Skipped(reason, persisted, trouble)

    def _decide(self, save: SaveId) -> Slot | Skip:
        obstacle = self.tiers.lost or self.writers.obstacle(save)
        kind = SkipKind.SUPERSEDED if self.tiers.lost else SkipKind.GONE
        decision = Skip(obstacle, kind) if obstacle else self._choose(save)
        if isinstance(decision, Skip):
            metrics.event("skipped", step=save.step, reason=decision.reason)
            self.persister.stats.skip(decision)
            self._lose(save, obstacle) if obstacle else self._skipped.skip(save, decision)
        self._skipped.last_was_skipped = isinstance(decision, Skip)
        self.peers.changed()
        self._decisions[save] = decision
        while len(self._decisions) > DECISIONS:
            del self._decisions[min(self._decisions)]
        return decision

    def _choose(self, save: SaveId) -> Slot | Skip:
        # A digest reads memory at full speed, and would slow down the copies of this save.
        self.digester.make_way()
        self._reservations.look_again()
        choice = self._choice()
        if isinstance(choice, Skip):  # reports of other ranks on the save before may not have been read yet
            self._read(*(slot for slot in self.slots if slot.id is not None and not slot.committed))
            choice = self._choice()
        return choice if isinstance(choice, Skip) else self._begin(self.slots[choice], save)

    def _choice(self, *, pinned_by_readers: bool = True) -> int | Skip:
        views = [slot.view(pinned_by_readers=pinned_by_readers) for slot in self.slots]
        return choose_slot(views, self.writers.latest, self.peers.common)

    def _begin(self, slot: Slot, save: SaveId) -> Slot | Skip:
        lacking = slot.writers - slot.done
        if slot.id is not None and lacking and (over := self.writers.passed_over(slot.id, lacking)):
            self._skipped.warn_of_mismatch(f"{over}, which can never be resumed")
        try:
            if not self.arena.is_there():
                self._restore()
            self._reservations.clear_away(slot, slot.begin(save, self.writers.all))
            self.persister.stats.begin(save)
            # After `begin`, which removes the old records, and before any writer copies into the slot.
            self._lend(slot, save)
        except (OSError, ArenaInUse) as error:
            self._read(slot)
            # Skipped on all ranks alike, since this decision is remembered for the id.
            return Skip(f"{self.arena.path} cannot be written to: {error}", SkipKind.UNWRITABLE)
        return slot

    def _restore(self) -> None:
        if self._ended:
            raise ArenaInUse("the job ends, and its memory is given back")
        for slot in self.slots:
            slot.forget()
        # The slots are forgotten first: directories of their names may be another job's now.
        self.arena.restore()
        for slot in self.slots:
            slot.clear()
        text = coded("%s was removed: what was in memory is lost; it was created again", "FC-005")
        logger.warning(text, self.arena.path)

    def _read(self, *slots: Slot) -> None:
        for slot in slots:
            self._take(slot, slot.read)

    def _take(self, slot: Slot, read: Callable[[], None]) -> None:
        # A new arena at the path of a removed one may be another job's.
        read() if self.arena.is_there() else slot.forget()
        for target, urgency in slot.take_wanted().items():
            self.persister.submit(slot, target, urgency)
        if slot.committed:
            self.tiers.claim(slot)
        if slot.id is not None and (why := self._obstacle(slot)):
            if slot.wanted or why.endswith(CLOSED):  # else its rank died in the middle, and the launcher reports that
                self._lose(slot.id, why)
            slot.wanted.clear()

    def _obstacle(self, slot: Slot) -> str:
        """Return why the save in a slot can never be whole; empty if it is, or may be."""
        return self.writers.obstacle(slot.id, slot.writers - slot.done) if slot.id and not slot.committed else ""

    def committed(self, writer: int, message: Committed | Uncommitted) -> None:
        """A writer has finished its part: read whether the save is whole now, and persist it if that was asked.

        One that could not write it is not waited for.
        """
        save = SaveId(message.history, message.step)
        slot = next((slot for slot in self.slots if slot.id == save), None)
        if slot is None:
            return
        if isinstance(message, Uncommitted):
            self.writers.fail(writer, save, message.reason)
        elif message.persist:
            # Before the record is read: with the last part the slot is whole, and is submitted with its wanted paths.
            slot.want(message.path, urgency_of(message))
        # Only this writer's record: reading all of them each time would cost the square of the number of ranks.
        self._take(slot, partial(slot.read_part, writer))
        if isinstance(message, Committed) and not slot.has(save, writer):
            self._read_again(slot, save, writer)
        if slot.committed:
            self.peers.committed()
            self.digester.look()
            self.persister.stats.save(save, slot.size)
            self.persister.owed.look()

    def _read_again(self, slot: Slot, save: SaveId, writer: int) -> None:
        """Read records that were there at a writer's report; if they cannot be read, nobody waits for its save."""
        self._take(slot, slot.read)
        if not slot.has(save, writer) and self.arena.is_there():
            slot.wanted.clear()
            self.writers.fail(writer, save, f"its record in {slot.path} cannot be read")
            self._lose(save, self.writers.obstacle(save, [writer]))

    async def fetch(self, message: Fetch, pid: int) -> Fetched:
        """Bring files of a save from other nodes' memory; raises as `MemoryPeers.fetch`."""

        def choose() -> Slot:
            # The ranks of this node have chosen a save that it lacks: of older saves they need none but the newest.
            choice = self._choice(pinned_by_readers=False)
            if isinstance(choice, Skip):
                raise FastckptError(f"there is no room for it: {choice.reason}")
            return self.slots[choice]

        fetched = await self.peers.fetch(message, choose, self.writers.ranks, pid)
        self._reservations.look_again()
        return fetched

    async def prepare(self, writer: int, files: dict[str, int], *, about: bool = False) -> None:
        """Make room in all empty slots for a writer's images of these sizes in bytes, soon; raises ArenaTooSmall.

        Sizes that it knows ``about`` only are never too large.
        """
        if about:
            self._reservations.guess(files, writer)
        else:
            await self._reservations.prepare(files, writer)

    def give_up(self, message: Bad) -> None:
        """The ranks have found checkpoints bad: persist the newest good one, if storage has none as new."""
        self.readers.give_up(message)
        self.tiers.look_again(self.flush) if message.storage else self.flush()

    def news(self, writer: int) -> list[list[int]]:
        """The ids made durable since the last news; they are for the first local rank, which a strategy runs in."""
        if writer != 0:
            return []
        news, self.persister.news = self.persister.news, []
        return [list(save) for save in news]

    def status(self, writer: int) -> Status:
        """Return the state of persistence."""
        way = self.persister
        # A save that lacks the part of the rank that asks cannot become whole while this waits.
        others = [slot for slot in self.slots if writer not in slot.writers - slot.done]
        waiting = way.waiting + (way.owed.save is not None) + sum(len(slot.wanted) for slot in others)
        filling = sum(slot.id is not None and not slot.committed and not self._obstacle(slot) for slot in others)
        news, durable = self.news(writer), list(way.durable or ())
        return Status(waiting, durable, news, way.trouble, way.stats.since, way.waiting, filling)

    async def close(self, *, finished: bool = False) -> bool:
        """Flush, then give the memory back; it is kept if its newest checkpoint could not be made durable.

        Of a job that has ``finished`` other nodes need not run the end once more. Returns whether all persists have
        come to an end.
        """
        # 1. read the records of late writers   2. flush, and wait for persists and uploads   3. look whether durable
        # checkpoints still are there   4. close the records of histories   5. remove the memory, or keep it if its
        # newest checkpoint is durable nowhere
        self.look()
        self.flush(ends=True)
        drained = await self.tiers.finish(self._settings.flush_timeout)
        drained = await self._marking.finish() and drained
        for text in await self.tiers.gone() if drained else ():
            logger.error("%s", text)
        newest = self.newest()
        await self.tiers.leave(finished=finished and drained and (newest is None or self.persister.durable is not None))
        await self._end(wait=drained)
        self._ended = True
        ids = [id for id in (newest.id if newest else None, self.persister.durable) if id is not None]
        self._skipped.report(max(ids, default=None), self._directory)
        lost = newest is not None and (self.persister.durable is None or self.persister.durable < (newest.id or ()))
        lost = lost and not self.tiers.ended_elsewhere  # nobody will resume it
        if lost and newest is not None and (self._settings.flush or self.persister.trouble or not drained):
            # Only the locks: the files stay for the next job, which adopts them.
            self.arena.release()
            trouble = self.persister.trouble or "not all of it had come to storage"
            why = trouble if drained else f"its flush was not done in {self._settings.flush_timeout:g} s"
            logger.error(
                coded(
                    "%s is in memory only (%s). It is kept: the next job with this checkpoint directory on this host "
                    "resumes from it, or copy it with: cp -r %s DESTINATION",
                    "FC-024",
                ),
                newest.id,
                why,
                newest.path,
            )
        else:
            await asyncio.to_thread(self.arena.remove)
        return drained

    async def abandon(self) -> None:
        """Leave the memory as it was found: `open` has failed."""
        await self._end(wait=True)
        # An adopted arena may hold the only copy of an earlier job's state; a new one is empty.
        await asyncio.to_thread(self.arena.release if self.arena.adopted else self.arena.remove)

    async def _end(self, *, wait: bool) -> None:
        self.peers.close()
        self._marking.close()
        await asyncio.to_thread(self.readers.close)
        self.digester.close()
        self.tiers.close(wait=wait)
        self._reservations.close()
        self.progress.close()
