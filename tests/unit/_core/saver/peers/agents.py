"""Agents of nodes with a save in their slots, and a relay between two of them."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory import slots
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.memory.slots import SlotBegin, SlotDone
from fastckpt._core.saver.peers.agent_peers import AgentPeers, NodeMemory
from fastckpt._core.saver.peers.file_transfer import SaveName
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.slot import Slot

SECRET, ATTEMPT, DIRECTORY = b"secret", "token", "/checkpoints"


def name_of(step: int) -> SaveName:
    return SaveName(DIRECTORY, SaveId(1, step), ATTEMPT)


def write_save(slot: Path, step: int, files: Mapping[str, bytes], node: int, nodes: int = 2) -> None:
    """Have a whole save of one of several nodes in a slot."""
    slots.begin(slot, SlotBegin(SaveId(1, step), frozenset({0})))
    for name, data in files.items():
        (slot / name).write_bytes(data)
    details = {"world_size": nodes, "rank": node, "node": node, "nodes": nodes, "attempt": ATTEMPT}
    slots.commit(slot, 0, SlotDone(SaveId(1, step), {name: len(data) for name, data in files.items()}, details))


class Agent:
    """One that serves what its node has to others."""

    def __init__(
        self, arena: Path, own: list[Slot], replicas: ReplicaFiles | None = None, parity: ParityFiles | None = None
    ) -> None:
        self.arena, self.slots = arena, own
        self.replicas = replicas or ReplicaFiles(arena, set, set, lambda: False)
        self.parity = parity or ParityFiles(arena, set, lambda: False)
        self.peers = AgentPeers(lambda directory: NodeMemory(arena, own, self.replicas, self.parity))
        self.address = f"127.0.0.1:{self.peers.serve()}"
        self.peers.assume(PeerRound([Peer("agent", "a", self.address, host="node1")], 0, SECRET))

    def link(self) -> closing[SealedConnection]:
        return link_to(self.address)


def link_to(address: str) -> closing[SealedConnection]:
    return closing(SealedConnection.connect(address, SECRET, 10))


def flip(path: Path, at: int = 12) -> None:
    """Change a bit of a file."""
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


@contextlib.contextmanager
def relay(address: str, at: int, harm: str, *, back: bool = False) -> Iterator[str]:
    """A way for one connection to an agent that flips a byte, ends or stands still: of what goes there, or back."""
    host, _, port = address.rpartition(":")

    def pass_on(of: socket.socket, to: socket.socket, harm: str) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(of.recv(1 << 16)):
                is_there = passed <= at < passed + len(data)
                if is_there and harm == "cut":
                    break
                if is_there and harm == "flip":
                    data[at - passed] ^= 1
                passed += len(data)
                if harm != "stall" or passed <= at:
                    to.sendall(data)
        for each in (of, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        inside, _ = listener.accept()
        with inside, socket.create_connection((host, int(port))) as outside:
            answers = threading.Thread(target=pass_on, args=(outside, inside, harm if back else ""))
            answers.start()
            pass_on(inside, outside, "" if back else harm)
            answers.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)
