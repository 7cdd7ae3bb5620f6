"""A copy of a save on another host, beside a bare transfer of the same bytes.

Hosts are namespaces of this machine, which needs root (tests/nodes/hosts.py). A copy is what agents do for each save: a
digest, sendfile, memory that was used before, a digest on arrival. The bare one is sendfile, and recv_into a mapped
file of a tmpfs that was used before.
"""

import json
import mmap
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn
from tests.nodes.hosts import Cluster, address_of, obstacle

MIB = 160
"""Size of the file; three of it have to fit into the 512 MiB of a host."""
ROUNDS, UNCOUNTED = 6, 3
"""Copies of each kind that count, and those before them that touch memory for the first time."""
SECRET = b"secret"
USAGE = "usage"
ARENA = Path("/dev/shm/arena")
BARE_PORT = 7001
BLOCK = 4 << 20
START = 60.0


def processor_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(folder: Path) -> None:
    """Keep copies as an agent does, and receive bare files, until the end of the process."""
    from fastckpt._core.memory.replica_files import ReplicaFiles
    from fastckpt._core.saver.peers.agent_peers import AgentPeers, NodeMemory
    from fastckpt._core.saver.peers.parity_files import ParityFiles
    from fastckpt._core.saver.peers.peer_round import Peer, PeerRound

    ARENA.mkdir(mode=0o700)
    replicas, parity = ReplicaFiles(ARENA, set, set, lambda: False), ParityFiles(ARENA, set, lambda: False)
    peers = AgentPeers(lambda directory: NodeMemory(ARENA, [], replicas, parity))
    peers.handle(USAGE, lambda connection, request: {"seconds": processor_seconds()})
    port = peers.serve()
    peers.assume(PeerRound([Peer("keeper", "b", f"{address_of(1)}:{port}")], 0, SECRET))
    threading.Thread(target=_serve_bare, daemon=True).start()
    (folder / "port.new").write_text(str(port))
    (folder / "port.new").rename(folder / "port")
    threading.Event().wait()


def _serve_bare() -> None:
    connected, _ = socket.create_server(("", BARE_PORT)).accept()
    size = MIB << 20
    fd = os.open("/dev/shm/bare", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, size)
    with mmap.mmap(fd, size) as memory, memoryview(memory) as view:
        got = 0
        while count := connected.recv_into(view[got : got + BLOCK]):
            got = (got + count) % size
            if not got:
                connected.sendall(b"k")


class Sender:
    """The host that has a save of one large file, each with other bytes."""

    def __init__(self, keeper: str) -> None:
        from fastckpt._core.ipc.sealed import SealedConnection
        from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
        from fastckpt._core.saver.peers.replica_sender import ReplicaSender
        from fastckpt._core.saver.stats import ReplicaCounts

        self._size, self._step, self._slot = MIB << 20, 0, ARENA / "slot-0"
        self._slot.mkdir(mode=0o700, parents=True)
        self._file = self._slot / "__0_0.distcp"
        self._file.write_bytes(os.urandom(1 << 20) * MIB)
        self._usage = SealedConnection.connect(keeper, SECRET, 30)
        partner = Peer("keeper", "b", keeper)
        self._round = PeerRound([Peer("sender", "a", ""), partner], 0, SECRET, [partner])
        self._sender = ReplicaSender("/checkpoints", None, ReplicaCounts())
        self._sender.assume(self._round)
        self._bare = socket.create_connection((keeper.partition(":")[0], BARE_PORT))

    def copy(self) -> dict[str, float]:
        """A copy of a new save, as agents make it; its digest is of the saver, before it."""
        from fastckpt._core.format.ids import SaveId
        from fastckpt._core.io.direct import digest_file
        from fastckpt._core.memory import slots
        from fastckpt._core.memory.held_saves import held_saves
        from fastckpt._core.saver.peers.common_saves import CommonSave

        self._step += 1
        save = SaveId(1, self._step)
        details = {"rank": 0, "world_size": 2, "nodes": 2, "node": 0, "attempt": "a"}
        slots.begin(self._slot, slots.SlotBegin(save, frozenset({0})))
        with self._file.open("r+b") as file:
            file.write(os.urandom(1 << 10))
        slots.commit(self._slot, 0, slots.SlotDone(save, {self._file.name: self._size}, details))
        slots.write_digests(self._slot, save, {self._file.name: digest_file(self._file)})
        (held,) = held_saves(ARENA, [self._slot])
        return self._figures(lambda: self._sender.send(held, CommonSave(SaveId(1, self._step - 1)), self._round))

    def bare(self) -> dict[str, float]:
        """The same bytes, without an agent."""
        return self._figures(self._send_bare)

    def _send_bare(self) -> bytes:
        with self._file.open("rb") as file:
            self._bare.sendfile(file)
        return self._bare.recv(1)

    def _theirs(self) -> float:
        return float(self._usage.ask({"ask": USAGE})["seconds"])

    def _figures(self, work: Callable[[], object]) -> dict[str, float]:
        since, used, theirs = time.monotonic(), processor_seconds(), self._theirs()
        assert work()
        seconds, gigabytes = time.monotonic() - since, self._size / 1e9
        sender, receiver = processor_seconds() - used, self._theirs() - theirs
        return {"rate": gigabytes / seconds, "sender": sender / gigabytes, "receiver": receiver / gigabytes}


def send(keeper: str) -> None:
    """Print figures of copies and bare transfers, by turns."""
    sender, found = Sender(keeper), dict[str, list[float]]()
    for number in range(ROUNDS + UNCOUNTED):
        for name in ("copy", "bare")[:: 1 if number % 2 else -1]:
            for key, value in getattr(sender, name)().items():
                found.setdefault(f"{name}_{key}", []).append(value)
    print(json.dumps({key: values[UNCOUNTED:] for key, values in found.items()}))


def measure(turn: Turn) -> Values:
    """Copies from one host to another."""
    with Cluster(turn.folder / "cluster", 0, 1) as cluster:
        port, output = turn.folder / "port", turn.folder / "output"
        cluster.hosts[1].start("-m", __name__, "serve", str(turn.folder), output=turn.folder / "served")
        end = time.monotonic() + START
        while not port.exists():
            if time.monotonic() > end:
                raise TimeoutError((turn.folder / "served").read_text())
            time.sleep(0.05)
        keeper = f"{address_of(1)}:{port.read_text()}"
        if cluster.hosts[0].start("-m", __name__, "send", keeper, output=output).wait():
            raise RuntimeError(output.read_text())
    found: dict[str, list[float]] = json.loads(output.read_text().splitlines()[-1])
    return found


BENCHMARK = Benchmark(
    name="replica_copy",
    question="What does a copy of a save on another host cost?",
    work="A file of 160 MiB between two network namespaces, beside a bare transfer.",
    contenders=[Contender("fastckpt", measure, obstacle)],
    figures=[
        Figure("rate of copies", "fastckpt.copy_rate", unit="GB/s"),
        Figure("the same : bare transfer", "fastckpt.copy_rate", "fastckpt.bare_rate", Goal("at least", 0.8)),
        Figure("processor time of the sender", "fastckpt.copy_sender", goal=Goal("at most", 0.25), unit="s/GB"),
        Figure("processor time of the receiver", "fastckpt.copy_receiver", goal=Goal("at most", 0.9), unit="s/GB"),
    ],
    gigabytes=0.0,
)

if __name__ == "__main__":
    {"serve": lambda folder: serve(Path(folder)), "send": send}[sys.argv[1]](sys.argv[2])
