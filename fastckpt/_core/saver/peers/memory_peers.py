"""The other nodes' part in the memory of one checkpoint directory: copies, the common save, and fetched files."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import binary
from fastckpt._core.config import AUTO, Settings
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.messages import Fetch, Fetched
from fastckpt._core.memory import slots
from fastckpt._core.memory.copies_folder import CopiesFolder, sweep_folders
from fastckpt._core.memory.headroom import headroom
from fastckpt._core.memory.held_saves import kept_place
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.saver.peers import fetcher
from fastckpt._core.saver.peers.agent_peers import AgentPeers
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.file_transfer import SaveName
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.peer_round import PeerRound
from fastckpt._core.saver.peers.replica_room import ReplicaRoom
from fastckpt._core.saver.peers.replica_sender import ReplicaSender
from fastckpt._core.saver.peers.replication import Replication
from fastckpt._core.saver.slot import READER, Slot
from fastckpt._core.saver.stats import ReplicaCounts
from fastckpt.errors import ArenaTooSmall, FastckptError

logger = logging.getLogger("fastckpt")

FetchKey = tuple[SaveId, str, frozenset[str]]
"""Save, attempt, and names of files that are fetched."""
NOTED = 10.0
"""Seconds for the event loop to take note of an answer."""


class MemoryPeers:
    """All methods run in the saver's event loop; the work is done in threads.

    Args:
        directory: The checkpoint directory.
        arena: Arena with this node's saves.
        of: Its slots.
        among: The agents of the round, and the limit on this one's copies.
        settings: Settings of the job.
        readers: Processes that read saves in memory, or look for one to load.
        copies: The directory on a disk for copies of other nodes' large files; None for the arena.

    Attributes:
        counts: Copies of this node's large files.
        replicas: Large files of other nodes that this one keeps.
        parity: Parity of such files, if this node keeps it.
        room: The memory for both.
        rate: A limit on the bytes that this node sends per second in the background; None for none.
        alike: Whether files that each node has of its own were equal on all nodes when they were last compared.
    """

    def __init__(
        self,
        directory: str,
        arena: Path,
        of: list[Slot],
        among: AgentPeers,
        settings: Settings,
        readers: set[int],
        copies: Path | None = None,
    ) -> None:
        self._directory, self._arena, self._slots = directory, arena, of
        self._answer, self.alike = CommonSave(), False
        self._round: PeerRound | None = None
        self._fetches: dict[FetchKey, asyncio.Task[tuple[Slot | None, Fetched]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_begun = self._has_committed = False
        self._readers = readers
        self.counts = ReplicaCounts()
        sender = ReplicaSender(directory, among.rate, self.counts)
        self._replication = Replication(
            directory, arena, lambda: [slot.path for slot in [*of]], self._answered, among.common_saves, sender
        )

        # Before the first commit of a round its workers may yet choose to resume from copies.
        def in_use() -> bool:
            return bool(readers) or not self._has_committed

        self._folder = folder = CopiesFolder(arena, copies)
        self.replicas = ReplicaFiles(arena, self._ids, lambda: self.common, in_use, lambda: self.room.refusal, folder)
        self.parity = ParityFiles(arena, lambda: self.common, in_use, folder=folder)
        is_optional = settings.replicas == AUTO
        self.room = ReplicaRoom(self._copies, self._bytes_of_copies, folder, self._make_way, is_optional=is_optional)

    @property
    def common(self) -> frozenset[SaveId]:
        """The saves that no slot may lose, because all nodes hold them: the newest such, and one that is to be it."""
        if self._is_alone and self._has_committed:
            return frozenset()  # others may hold it no more, and this node's later saves are whole
        return frozenset(id for id in (self._answer.id, self._answer.next) if id)

    @property
    def address(self) -> str:
        """Address at which the other agents reach this one; empty if there are none."""
        return self._round.peers[self._round.own].address if self._round and not self._is_alone else ""

    @property
    def _is_alone(self) -> bool:
        """True if there was a round, and the newest is of this agent alone."""
        return self._round is not None and len(self._round.peers) == 1

    def _ids(self) -> set[SaveId]:
        return {slot.id for slot in [*self._slots] if slot.id}

    def _copies(self) -> float:
        """Memory that others need for copies or parity of this node's files, as a multiple of the files' size."""
        count = len(self._round.partners) if self._round else 0
        return 1 / count if self._round and self._round.parity and count else count

    def _bytes_of_copies(self) -> int:
        return self.replicas.bytes() + self.parity.bytes()

    def assume(self, round: PeerRound) -> None:
        """Take part in a new round."""
        self._round, self._loop = round, asyncio.get_running_loop()
        self._has_begun = self._has_committed = False
        self.counts.newest = None  # the new round may go on from an older one
        self._replication.assume(round)

    def clear_away(self) -> None:
        """Remove copies of owners that died: unfinished ones, spare ones, and those of no arena."""
        self.replicas.clear_away()
        self.parity.clear_away()
        if self._folder.path != self._arena:
            sweep_folders(self._folder.path.parent)

    def committed(self) -> None:
        """Something was committed."""
        self._has_committed = True
        self._replication.look()
        if self._is_alone:  # no other agent makes way for copies of newer saves
            asyncio.get_running_loop().run_in_executor(None, self._give_back, self._ids())

    def changed(self) -> None:
        """A save begins: fetched files may be overwritten."""
        self._fetches.clear()
        self._has_begun = True

    def _give_back(self, needed: Collection[SaveId]) -> None:
        """Remove copies of other saves than these, unless a worker may resume them yet; in a thread."""
        if self._has_begun and not self._readers:
            self.replicas.give_back(needed, small=self._is_alone)
            self.parity.give_back(needed)

    def _make_way(self, *, for_good: bool) -> None:
        """Give back copies to make room for slots; copies that a resume needs now only ``for_good``."""
        before = self._bytes_of_copies()
        self._give_back(() if for_good else self.common)
        if for_good and (given := before - self._bytes_of_copies()):
            text = coded(
                "copies of other hosts' files are given up, %s in all: saves need the memory. Until the next one is "
                "whole, a failure costs what is not on storage",
                "FC-045",
            )
            logger.warning(text, binary(given))

    def close(self) -> None:
        """Copy and report nothing more."""
        self._replication.close()
        self.parity.close()
        self._folder.close()

    def _answered(self, answer: CommonSave | None) -> None:
        """Note an answer, or that there is none; in another thread than the event loop's."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._note(answer), self._loop).result(NOTED)

    async def _note(self, answer: CommonSave | None) -> None:
        # In the event loop, where slots are chosen: none is being given away meanwhile. In a new round
        # the common save is that of the last one until there is another.
        self._answer = replace(answer, id=answer.id or self._answer.id) if answer else CommonSave()
        self.counts.newest = self._answer.id if self._answer.is_replicated else self.counts.newest
        if answer and answer.alike is not None:
            self.alike = answer.alike

    async def fetch(self, message: Fetch, choose: Callable[[], Slot], ranks: Mapping[int, int], pid: int) -> Fetched:
        """Bring files of a save from other agents' memory, once for all local ranks.

        Args:
            message: Names and places of the files.
            choose: The slot to put them into; it may raise FastckptError.
            ranks: The numbers of the local ranks among those of all nodes.
            pid: The process that reads them.

        Raises FastckptError or OSError if no other agent has them, or none gives them undamaged.
        """
        save = SaveName(self._directory, SaveId(*message.save), message.attempt)
        key = save.id, save.attempt, frozenset(message.sources)
        if key not in self._fetches:
            task = self._fetches[key] = asyncio.create_task(self._fetch(save, message, choose, ranks))
            task.add_done_callback(partial(self._forget_failure, key))
        slot, fetched = await asyncio.shield(self._fetches[key])
        self._readers.add(pid)
        if slot is not None:
            slot.pins[f"{READER}{pid}"] = f"step {save.id.step} is being loaded by process {pid}"
        return fetched

    def _forget_failure(self, key: FetchKey, task: asyncio.Task[Any]) -> None:
        """Let a fetch that failed be tried again: another agent may have had no memory, or no descriptor, for once."""
        if (task.cancelled() or task.exception() is not None) and self._fetches.get(key) is task:
            del self._fetches[key]

    async def _fetch(
        self,
        save: SaveName,
        message: Fetch,
        choose: Callable[[], Slot],
        ranks: Mapping[int, int],
    ) -> tuple[Slot | None, Fetched]:
        # 1. the sources' offers   2. a place: a slot, or the copies of other nodes' files if this node has its part of
        # the save   3. the files, each from the first source that has it   4. the records that make it ours
        if (round := self._round) is None:
            raise FastckptError("this agent is in no round with others")
        loop, sources, since = asyncio.get_running_loop(), message.sources, time.perf_counter()
        offers = await loop.run_in_executor(None, fetcher.survey, save, sources, round.secret)
        is_ours = any(s.committed and s.id == save.id for s in self._slots)
        slot = None if is_ours or message.beside else choose()
        if slot is not None:
            slot.clear()
            slot.pins["fetch"] = f"step {save.id.step} is being fetched from other nodes"
            await loop.run_in_executor(None, slots.discard, slot.path, list(slots.images_in(slot.path)))
        elif (size := sum(fetcher.sizes_of(offers, sources.keys()).values())) > (room := headroom(self._arena)).free:
            # Above the limit of a cgroup this process would be killed.
            raise ArenaTooSmall(f"{binary(size)} of other nodes do not fit beside the slots: {room}")
        root = slot.path if slot else kept_place(self._arena, save.id, save.attempt)
        try:
            bring = partial(fetcher.fetch_all, save, root, sources, offers, round.secret)
            files = await loop.run_in_executor(None, bring)
            came = sum(files.sizes.values())
            if slot is not None:
                numbers = [ranks[local] for local in sorted(ranks)]
                kept = kept_place(self._arena, save.id, save.attempt)
                take = partial(fetcher.with_kept, slot.path, kept, save, files, numbers)
                files = await loop.run_in_executor(None, take)
                make = partial(fetcher.make_ours, slot.path, save, files, numbers, round.own)
                if await loop.run_in_executor(None, make):
                    slot.read()
                    slot.verified = slot.committed  # each digest was compared as the bytes came
        finally:
            if slot is not None:
                slot.pins.pop("fetch", None)
        here, seconds = sum(files.sizes.values()) - came, time.perf_counter() - since
        metrics.event("fetched", history=save.id.history, step=save.id.step, bytes=came, kept=here, seconds=seconds)
        paths = {name: str(root / name) for name in files.sizes}
        return slot, Fetched(paths, dict(files.sizes), dict(files.digests), files.details)
