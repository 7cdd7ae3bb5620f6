"""This agent among those of the other nodes: what it answers them, of all checkpoint directories."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory.held_saves import HeldSave
from fastckpt._core.memory.parity_records import whole_parities
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.saver.peers import file_transfer
from fastckpt._core.saver.peers.common_saves import CommonSave, CommonSaves, HeldReport
from fastckpt._core.saver.peers.file_transfer import GET, KEEP, LIST, SaveName
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.parity_rebuild import CHUNK, REBUILD, serve_chunk, serve_rebuilt
from fastckpt._core.saver.peers.parity_transfer import PARITY, take_chunk
from fastckpt._core.saver.peers.peer_round import PeerRound
from fastckpt._core.saver.peers.peer_server import Handler, PeerServer
from fastckpt._core.saver.peers.replica_transfer import REPLICATE, take_replica
from fastckpt._core.saver.peers.replication import HELD, LONGEST_WAIT
from fastckpt._core.saver.slot import Slot
from fastckpt.errors import FastckptError


class NodeMemory(NamedTuple):
    """What this node has in memory for a checkpoint directory: arena, slots, large files of others, and parity."""

    arena: Path
    slots: Sequence[Slot]
    replicas: ReplicaFiles
    parity: ParityFiles


Memory = Callable[[str], NodeMemory]
"""The memory for a checkpoint directory; raises FastckptError if this node has none."""


class AgentPeers:
    """Serves other agents from the first round with several nodes on.

    Args:
        memory: Finds what this node holds; called in threads.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._server: PeerServer | None = None
        self._lock = Lock()
        self._common: dict[str, CommonSaves] = {}
        self._others: dict[str, Handler] = {}
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
            }
            self._server = PeerServer(handlers | self._others)
        return self._server.port

    def assume(self, round: PeerRound) -> bool:
        """Take part in a new round, and serve whoever knows its secret; whether agents of the last one are gone."""
        with self._lock:
            former = {peer.id for peer in self.round.peers} if self.round else set()
            self.round, self._common = round, {}
        if self._server is not None:
            self._server.set_secret(round.secret)
        return not former <= {peer.id for peer in round.peers}

    def common_saves(self, directory: str) -> CommonSaves:
        """What all agents of this round hold of a directory, as far as they have reported it to this one."""
        with self._lock:
            if directory not in self._common:
                self._common[directory] = CommonSaves([peer.id for peer in self.round.peers] if self.round else [])
            return self._common[directory]

    def close(self) -> None:
        """Serve nobody any more."""
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
        return file_transfer.serve(connection, self._find(request), request.get("name"))

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

    def _held(self, _: SealedConnection, request: dict[str, Any]) -> dict[str, Any]:
        directory = request.get("directory")
        if not isinstance(directory, str):
            raise FastckptError("the report names no directory")
        known = CommonSave.from_json(request["known"]) if request.get("known") else None
        return self.common_saves(directory).report(HeldReport.from_json(request), known, LONGEST_WAIT).to_json()
