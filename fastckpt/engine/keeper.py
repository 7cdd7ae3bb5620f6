"""Keeps the checkpoints of one directory in memory: which slot a save takes, what is committed, what is pinned."""

import asyncio
import logging

from fastckpt import metrics
from fastckpt.config import Settings
from fastckpt.engine.digester import Digester
from fastckpt.engine.levels import Levels
from fastckpt.engine.persister import PIN
from fastckpt.engine.progress import Progress
from fastckpt.engine.readers import Readers
from fastckpt.engine.room import Room
from fastckpt.engine.slot import Slot
from fastckpt.engine.staging import staging_path
from fastckpt.engine.writers import Writers
from fastckpt.errors import ArenaInUse, FastckptError
from fastckpt.format.ids import SaveId
from fastckpt.ipc.messages import Bad, BeginSave, Committed, Granted, Hello, Skipped, Status
from fastckpt.memory.arena import Arena, arena_path
from fastckpt.memory.presence import forget_the_dead
from fastckpt.policy.slots import Skip, choose_slot
from fastckpt.storage.copier import Copier

logger = logging.getLogger("fastckpt")

ORPHANS_DEADLINE = 10.0
"""Seconds that killed writers of a dead owner have to be gone before its memory counts as lost."""
DECISIONS = 64
"""How many decisions on saves are remembered, for writers that are behind."""


class Keeper:
    """One checkpoint directory on this node. All methods but the first run in the saver's event loop."""

    def __init__(self, hello: Hello, settings: Settings, copier: Copier) -> None:
        """Make or adopt the arena; raises ArenaInUse."""
        self._settings = settings
        self.levels = Levels(hello, self.newest, copier)
        self.persister = self.levels.persister
        path = arena_path(settings.shm_dir, hello.directory, hello.group_rank)
        self.arena = Arena.open(path, hello.directory)
        self.slots: list[Slot] = []
        self.progress = Progress(path, hello.local_world_size)
        self.readers = Readers(self.slots, staging_path(path), self.persister, flush=settings.flush)
        self._room = Room(self.arena, self.slots, self.newest)
        self.digester = Digester(self.newest)
        self.writers = Writers(hello.local_world_size)
        self._decisions: dict[SaveId, Slot | Skip] = {}
        self._skipping = False

    async def open(self) -> None:
        """Read what memory and storage hold."""
        loop = asyncio.get_running_loop()
        with metrics.phase("arena.adopt"):
            alone = await loop.run_in_executor(None, self.arena.drive_out_writers, ORPHANS_DEADLINE)
        if not alone:
            logger.warning("writers of an earlier job still use %s: its memory is not resumed", self.arena.path)
        ours = self.arena.claim_for(await loop.run_in_executor(None, self.persister.storage.identity))
        if not (alone and ours):
            self.arena.renew()
        self.arena.make_slots(self._settings.slots)
        self.slots += [Slot(path) for path in self.arena.slots]
        for slot in self.slots:
            slot.recover()
        in_memory = max((slot.id for slot in self.slots if slot.id), default=None)
        self.writers.newest_history = await self.levels.open(in_memory)
        self.digester.look()

    def newest(self) -> Slot | None:
        """The slot with the newest whole checkpoint; None if memory holds none."""
        return max((slot for slot in self.slots if slot.committed), key=lambda slot: slot.id or (), default=None)

    def join(self, hello: Hello, pid: int) -> int:
        """A writer says hello; the history that it writes. Raises FastckptError while it has another checkpointer."""
        history = self.writers.join(hello.local_rank, pid)
        try:
            self.levels.join(hello)
        except FastckptError:
            self.writers.lose(hello.local_rank, pid)
            raise
        self.digester.enabled = hello.verify != "never"
        return history

    def lost(self, local_rank: int, pid: int) -> None:
        """A writer hung up or died: it reads no more."""
        self.readers.release(pid)
        self.writers.lose(local_rank, pid)

    def restart(self) -> None:
        """All workers are dead and reaped: read the records, pin the newest checkpoint and flush it."""
        self._read(*self.slots)
        for slot in self.slots if self.arena.is_there() else ():
            pins = {name: why for name, why in slot.pins.items() if name.startswith(PIN)}
            slot.recover()
            slot.pins.update(pins)
        self.progress.tell()
        forget_the_dead(self.arena.path)
        self.writers.restart()
        self._decisions.clear()
        self.flush()
        self.digester.look()

    def flush(self) -> None:
        """Persist the newest checkpoint in memory if storage has none as new, and the settings let us."""
        if self._settings.flush and (newest := self.newest()) is not None:
            self.persister.flush(newest)

    async def begin(self, writer: int, message: BeginSave) -> Granted | Skipped:
        """Choose a slot for a save, once for all writers, and anew for one that asks again; raises ArenaTooSmall."""
        save = SaveId(message.history, message.step)
        again = self.writers.begin(writer, save)
        known = self._decisions.get(save)
        decision = self._decide(save) if known is None or (again and isinstance(known, Skip)) else known
        persisted, trouble = self.news(writer), self.levels.trouble
        if isinstance(decision, Slot) and decision.id == save and writer in decision.done:
            return Skipped("memory holds it already", persisted, trouble)
        if isinstance(decision, Slot) and decision.id == save:
            await self._room.reserve(decision, message.files, writer)
            self._room.reserve_ahead(message.files, writer)
            return Granted(str(decision.path), persisted, trouble)
        reason = decision.reason if isinstance(decision, Skip) else "a newer step has taken its slot"
        return Skipped(reason, persisted, trouble)

    def _decide(self, save: SaveId) -> Slot | Skip:
        self.digester.make_way()
        choice = choose_slot([slot.view() for slot in self.slots], self.writers.latest)
        decision = choice if isinstance(choice, Skip) else self._begin(self.slots[choice], save)
        if isinstance(decision, Skip):
            metrics.event("skipped", step=save.step, reason=decision.reason)
            self.persister.tally.skip(decision.reason)
            if not self._skipping:
                logger.warning("saves are skipped from step %d on: %s", save.step, decision.reason)
        self._skipping = isinstance(decision, Skip)
        self._decisions[save] = decision
        while len(self._decisions) > DECISIONS:
            del self._decisions[min(self._decisions)]
        return decision

    def _begin(self, slot: Slot, save: SaveId) -> Slot | Skip:
        try:
            if not self.arena.is_there():
                self._restore()
            slot.begin(save, self.writers.expected)
        except (OSError, ArenaInUse) as error:
            self._read(slot)
            return Skip(f"{self.arena.path} cannot be written to: {error}")
        return slot

    def _restore(self) -> None:
        for slot in self.slots:
            slot.forget()
        self.arena.restore()
        for slot in self.slots:
            slot.clear()
        logger.warning("%s was removed: what was in memory is lost; it was made anew", self.arena.path)

    def _read(self, *slots: Slot) -> None:
        for slot in slots:  # what lies in an arena that was removed since may be another job's
            slot.read() if self.arena.is_there() else slot.forget()
            for target in slot.take_wanted():
                self.persister.submit(slot, target)

    def committed(self, message: Committed) -> None:
        """A writer has finished its part: read whether the save is whole now, and persist it if that was asked."""
        save = SaveId(message.history, message.step)
        slot = next((slot for slot in self.slots if slot.id == save), None)
        if slot is None:
            return
        if message.persist:
            slot.wanted.append(message.path)
        self._read(slot)
        if slot.committed:
            self.digester.look()
            self.persister.tally.save(save, slot.size)

    def prepare(self, writer: int, files: dict[str, int]) -> None:
        """Make room in all empty slots for a writer's images of these sizes in bytes, soon; raises ArenaTooSmall."""
        self._room.prepare(files, writer)

    def give_up(self, message: Bad) -> None:
        """The ranks have found checkpoints bad: persist what is good, and newer than what is left."""
        self.readers.give_up(message.memory)
        self.levels.look_again(self.flush) if message.storage else self.flush()

    def news(self, writer: int) -> list[list[int]]:
        """The ids made durable since the last news; they are for the first local rank, which a strategy runs in."""
        if writer != 0:
            return []
        news, self.persister.news = self.persister.news, []
        return [list(save) for save in news]

    def status(self, writer: int) -> Status:
        """How far persistence is."""
        way = self.persister
        waiting = way.waiting + sum(len(slot.wanted) for slot in self.slots)
        return Status(waiting, list(way.durable or ()), self.news(writer), way.trouble, way.tally.since)

    async def close(self) -> bool:
        """Flush, then give the memory back; it is kept if its newest checkpoint could not be made durable.

        Returns whether all persists have come to an end.
        """
        self._read(*self.slots)  # a writer may have died before it told of its last save
        self.flush()
        drained = await self.levels.finish(self._settings.flush_timeout)
        self._end(wait=drained)
        newest = self.newest()
        lost = newest is not None and (self.persister.durable is None or self.persister.durable < (newest.id or ()))
        if lost and newest is not None and (self._settings.flush or self.persister.trouble or not drained):
            self.arena.release()
            why = self.persister.trouble if drained else f"its flush was not done in {self._settings.flush_timeout:g} s"
            logger.error(
                "%s is in memory only (%s). It is kept: the next job with this checkpoint directory on this host "
                "resumes from it, or copy it with: cp -r %s DESTINATION",
                newest.id, why, newest.path,
            )  # fmt: skip
        else:
            self.arena.remove()
        return drained

    def abandon(self) -> None:
        """Leave the memory as it was found: `open` has failed."""
        self._end(wait=True)
        self.arena.release() if self.arena.adopted else self.arena.remove()

    def _end(self, *, wait: bool) -> None:
        self.readers.close()
        self.digester.close()
        self.levels.close(wait=wait)
        self._room.close()
        self.progress.close()
