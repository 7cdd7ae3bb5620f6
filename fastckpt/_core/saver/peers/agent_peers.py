"""This agent among those of the other nodes: its answers to them, for all checkpoint directories."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple

from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.rate import RateLimit
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory.held_saves import HeldSave, held_saves
from fastckpt._core.memory.parity_records import whole_parities
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.policy.replicas.margins import NodeMargin
from fastckpt._core.saver.peers import file_transfer
from fastckpt._core.saver.peers.common_saves import CommonSave, CommonSaves, HeldReport
from fastckpt._core.saver.peers.file_transfer import GET, KEEP, LIST, SaveName
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.parity_rebuild import CHUNK, REBUILD, serve_chunk, serve_rebuilt
from fastckpt._core.saver.peers.parity_transfer import PARITY, take_chunk
from fastckpt._core.saver.peers.peer_round import PeerRound
from fastckpt._core.saver.peers.peer_server import Handler, PeerServer
from fastckpt._core.saver.peers.replica_transfer import REPLICATE, take_replica
from fastckpt._core.saver.peers.replication import HELD
from fastckpt._core.saver.peers.spare_prefetch import BACKGROUND, PREFETCH, SaveAtRisk, SparePrefetch
from fastckpt._core.saver.slot import Slot
from fastckpt.errors import FastckptError

PATIENCE, PAUSE = 5.0, 0.2
"""Seconds that a spare waits for another answer than it has, and between two looks."""


class NodeMemory(NamedTuple):
    """Memory of this node for a checkpoint directory: arena, slots, large files of others, and parity."""

    arena: Path
    slots: Sequence[Slot]
    replicas: ReplicaFiles
    parity: ParityFiles


Memory = Callable[[str], NodeMemory]
"""The memory for a checkpoint directory; raises FastckptError if this node has none."""


class AgentPeers:
    """Serves other agents from the first round with several nodes on.

    Args:
        memory: Finds this node's files; called in threads.
        mbps: MB (10**6 bytes) of copies that this node sends per second at most; 0 for no limit.

    Attributes:
        rate: That limit, which all checkpoint directories share.
        round: The round that this agent is in; None before its first one.
        prefetch: Files of others that this node fetched before it had a rank; None for none.
    """

    def __init__(self, memory: Memory, mbps: float = 0.0) -> None:
        self._memory = memory
        self.rate = RateLimit(mbps * 1e6) if mbps else None
        self._server: PeerServer | None = None
        self._lock = Lock()
        self._common: dict[str, CommonSaves] = {}
        self._risks: dict[str, tuple[PeerRound, tuple[SaveId, NodeMargin], dict[str, Any]]] = {}
        self._others: dict[str, Handler] = {}
        self._ended = Event()
        self.prefetch: SparePrefetch | None = None
        self.round: PeerRound | None = None

    def handle(self, request: str, handler: Handler) -> None:
        """Have requests of this name carried out, too; call it before `serve`."""
        self._others[request] = handler

    def serve(self) -> int:
        """Listen for the agents of other nodes, if this does not yet; returns the port."""
        if self._server is None:
            handlers = {
                LIST: self._list,
                GET: self._get,
                KEEP: self._keep,
                REPLICATE: self._replicate,
                PARITY: self._take_chunk,
                CHUNK: self._give_chunk,
                REBUILD: self._rebuild,
                HELD: self._held,
                PREFETCH: self._at_risk,
            }
            self._server = PeerServer(handlers | self._others)
        return self._server.port

    def assume(self, round: PeerRound) -> bool:
        """Take part in a new round, and serve agents with its secret; returns whether agents of the last are gone."""
        with self._lock:
            former = {peer.id for peer in self.round.peers} if self.round else set()
            self.round, self._common, self._risks = round, {}, {}
        if self._server is not None:
            self._server.set_secret(round.secret)
        return not former <= {peer.id for peer in round.peers}

    def mark_of(self, directory: str) -> str:
        """The mark of a checkpoint directory, as another agent of this round knows it; empty if none does."""
        round = self.round
        others = [peer for rank, peer in enumerate(round.peers) if rank != round.own] if round else []
        return next((peer.marks[directory] for peer in others if directory in peer.marks), "")

    def common_saves(self, directory: str) -> CommonSaves:
        """Return the saves of a directory that all agents of this round hold, as far as they have reported so."""
        with self._lock:
            if directory not in self._common:
                self._common[directory] = CommonSaves([peer.id for peer in self.round.peers] if self.round else [])
            return self._common[directory]

    def close(self) -> None:
        """Serve nobody any more."""
        self._ended.set()
        if self._server is not None:
            self._server.close()

    def _find(self, request: dict[str, Any]) -> HeldSave:
        save = SaveName.of(request)
        memory = self._memory(save.directory)
        return file_transfer.find(memory.arena, [slot.path for slot in memory.slots], save)

    def _list(self, _: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        held = self._find(request)
        found = whole_parities(self._memory(SaveName.of(request).directory).arena, held.id, held.attempt)
        parity = [[each.group, each.own, {id: of.files for id, of in each.members.items()}] for each in found]
        return {**file_transfer.listing(held), "parity": parity}

    def _get(self, connection: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        rate = self.rate if request.get(BACKGROUND) else None
        return file_transfer.serve(connection, self._find(request), request.get("name"), rate)

    def _keep(self, connection: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        save = SaveName.of(request)
        contents = file_transfer.contents_of(connection, request)  # first: else they would be taken for a request
        memory = self._memory(save.directory)
        with memory.replicas.lock:  # two nodes may send files of one save at once, and their digests come together
            file_transfer.take(memory.arena, save, request, contents)
        memory.replicas.release_old()
        return {"kept": True}

    def _replicate(self, connection: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        save = SaveName.of(request)
        return take_replica(connection, save, request, self._memory(save.directory).replicas)

    def _take_chunk(self, connection: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        save = SaveName.of(request)
        return take_chunk(connection, save, request, self._memory(save.directory).parity)

    def _give_chunk(self, connection: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        return serve_chunk(connection, self._find(request), request)

    def _rebuild(self, connection: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        save, round = SaveName.of(request), self.round
        if round is None:
            raise FastckptError("this agent is in no round with others")
        return serve_rebuilt(connection, save, request, self._memory(save.directory).parity, round.secret)

    def _at_risk(self, _: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a spare with the saves to prefetch, once they differ from those that it knows, or after a while."""
        round, known, end = self.round, request.get("known"), time.monotonic() + PATIENCE
        while (found := self._saves_at_risk()) == known and self.round is round and time.monotonic() < end:
            if self._ended.wait(PAUSE):
                break
        return {"saves": found}

    def _saves_at_risk(self) -> dict[str, Any]:
        """The newest common save of each directory, and the node with the fewest copies of its files, if any."""
        with self._lock:
            round, common = self.round, dict(self._common)
        found = {}
        for directory, saves in common.items():
            if round is None or (at_risk := saves.smallest_margin()) is None:
                continue
            known = self._risks.get(directory)
            if known is not None and known[0] is round and known[1] == at_risk:  # records are read once for each save
                found[directory] = known[2]
                continue
            (id, margin), memory = at_risk, self._memory(directory)
            held = held_saves(memory.arena, [slot.path for slot in [*memory.slots]])
            if attempt := next((each.attempt for each in held if each.id == id and each.slot), ""):
                peer = round.peers[margin.rank]
                found[directory] = SaveAtRisk(id, attempt, peer.address, peer.host, margin.copies).to_json()
                self._risks[directory] = round, at_risk, found[directory]
        return found

    def _held(self, _: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        directory = request.get("directory")
        if not isinstance(directory, str):
            raise FastckptError("the report names no directory")
        known = CommonSave.from_json(request["known"]) if request.get("known") else None
        common = self.common_saves(directory)
        return common.report(HeldReport.from_json(request), known, common.longest_wait).to_json()
