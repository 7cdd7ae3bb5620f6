"""Cost of copies on other hosts, beside a bare transfer and beside training; and of the loss of a host with them.

    python benchmarks/replicas.py [--mib 160] [--rounds 6] [--part copy|parity|beside|loss|lag]

Hosts are namespaces of this machine, which needs root (tests/nodes/hosts.py). A copy is what agents do for each save: a
digest, sendfile, memory that was used before, a digest on arrival. The bare one is sendfile, and recv_into a mapped
file of a tmpfs that was used before. Parity is that of the chunks of three hosts, a third of a save each, which come to
the fourth at once; the bare transfer has as many bytes. Contenders take turns; figures are medians. The job of the
losses is that of tests/nodes: FSDP2 on three hosts, with shards of 25 MB on each. They are saved to memory every ten
steps, and to storage every 40. Reads from storage after the loss are counted.
"""

import argparse
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.direct import digest_file
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory import slots
from fastckpt._core.memory.held_saves import held_saves
from fastckpt._core.memory.replica_files import ReplicaFiles
from fastckpt._core.memory.slots import SlotBegin, SlotDone
from fastckpt._core.saver.peers.agent_peers import AgentPeers, NodeMemory
from fastckpt._core.saver.peers.common_saves import CommonSave
from fastckpt._core.saver.peers.file_transfer import SaveName
from fastckpt._core.saver.peers.parity_files import ParityFiles
from fastckpt._core.saver.peers.parity_transfer import send_chunk
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replica_sender import ReplicaSender
from fastckpt._core.saver.peers.replica_transfer import LargeFile
from fastckpt._core.saver.stats import ReplicaCounts
from tests.nodes.hosts import Cluster, address_of, obstacle
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.recovery import Recovery
from tests.nodes.storage_reads import DATA, StorageReads
from tests.support.json_lines import whole_lines

SECRET = b"secret"
USAGE = "usage"
ARENA = Path("/dev/shm/arena")
BARE_PORT = 7001
BLOCK = 4 << 20
LAG_STEPS = 300
TRAINING = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[2]))
model = torch.nn.Sequential(*[torch.nn.Linear(768, 768) for _ in range(6)])
optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(256, 768)
with open(sys.argv[1], "w", buffering=1) as file:
    while True:
        since = time.monotonic()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        file.write(f"{since} {time.monotonic() - since}\\n")
"""


def processor_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- the host that keeps copies


def serve(folder: Path) -> None:
    """Keep copies as an agent does, and receive bare files, until the end of the process."""
    ARENA.mkdir(mode=0o700)
    replicas = ReplicaFiles(ARENA, set, set, lambda: False)
    parity = ParityFiles(ARENA, set, lambda: False)
    peers = AgentPeers(lambda directory: NodeMemory(ARENA, [], replicas, parity))
    most = MostMemory(parity)
    peers.handle(USAGE, lambda connection, request: {"seconds": processor_seconds(), **most.found()})
    port = peers.serve()
    peers.assume(PeerRound([Peer("keeper", "b", f"{address_of(1)}:{port}")], 0, SECRET))
    threading.Thread(target=_serve_bare, daemon=True).start()
    (folder / "port").write_text(str(port))
    threading.Event().wait()


class MostMemory:
    """The most memory since the last question: parity, and what this process has beside that."""

    def __init__(self, parity: ParityFiles) -> None:
        self._parity, self._parity_bytes, self._own = parity, 0, 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            with Path("/proc/self/status").open() as file:
                anonymous = next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
            self._own, self._parity_bytes = max(self._own, anonymous), max(self._parity_bytes, self._parity.bytes())
            time.sleep(0.005)

    def found(self) -> dict[str, int]:
        """Bytes; from now on it counts again from 0."""
        found = {"parity": self._parity_bytes, "own": self._own}
        self._parity_bytes = self._own = 0
        return found


def _serve_bare() -> None:
    listener = socket.create_server(("", BARE_PORT))
    kept: dict[int, mmap.mmap] = {}
    while True:
        connected, _ = listener.accept()
        while header := connected.recv(8):
            size = int.from_bytes(header, "little")
            if size not in kept:
                fd = os.open("/dev/shm/bare", os.O_RDWR | os.O_CREAT)
                os.posix_fallocate(fd, 0, size)
                kept[size] = mmap.mmap(fd, size)
            with memoryview(kept[size]) as view:
                got = 0
                while got < size:
                    got += connected.recv_into(view[got : got + BLOCK])
            connected.sendall(b"k")


# --- the host that has a save


class Sender:
    """Sends saves of one large file, each with other bytes, and measures both ends."""

    def __init__(self, mib: int, keeper: str) -> None:
        self._size, self._keeper = mib << 20, keeper
        self._step = 0
        self._slot = ARENA / "slot-0"
        self._slot.mkdir(mode=0o700, parents=True)
        (self._slot / "__0_0.distcp").write_bytes(os.urandom(1 << 20) * mib)
        self._usage = SealedConnection.connect(keeper, SECRET, 30)
        partner = Peer("keeper", "b", keeper)
        self._round = PeerRound([Peer("sender", "a", ""), partner], 0, SECRET, [partner])
        self._sender = ReplicaSender("/checkpoints", None, ReplicaCounts())
        self._sender.assume(self._round)
        self._idle = self._usage.ask({"ask": USAGE})
        self._links = [SealedConnection.connect(keeper, SECRET, 30) for _ in range(3)]
        self._bare = socket.create_connection((keeper.partition(":")[0], BARE_PORT))

    def ours(self) -> dict[str, float]:
        """A copy of a new save, as agents make it."""
        self._step += 1
        save = SaveId(1, self._step)
        details = {"rank": 0, "world_size": 2, "nodes": 2, "node": 0, "attempt": "a"}
        slots.begin(self._slot, SlotBegin(save, frozenset({0})))
        with (self._slot / "__0_0.distcp").open("r+b") as file:
            file.write(os.urandom(1 << 10))
        slots.commit(self._slot, 0, SlotDone(save, {"__0_0.distcp": self._size}, details))
        used = processor_seconds()
        digest = digest_file(self._slot / "__0_0.distcp")
        digested = processor_seconds() - used
        slots.write_digests(self._slot, save, {"__0_0.distcp": digest})
        (held,) = held_saves(ARENA, [self._slot])
        since, used, theirs = time.monotonic(), processor_seconds(), self._theirs()
        assert self._sender.send(held, CommonSave(SaveId(1, self._step - 1)), self._round)
        return self._figures(since, used, theirs) | {"digest": digested / (self._size / 1e9)}

    def parity(self) -> dict[str, float]:
        """The chunks of three members for the fourth, which come at once: as many bytes as each member has."""
        self._step += 1
        name, path = "__0_0.distcp", self._slot / "__0_0.distcp"
        with path.open("r+b") as file:
            file.write(os.urandom(1 << 10))
        files, save = [LargeFile(name, path, self._size, digest_file(path))], SaveName("/c", SaveId(1, self._step), "a")
        common, group = CommonSave(SaveId(1, self._step - 1), is_replicated=True), ("a", "b", "c", "keeper")
        since, used, theirs = time.monotonic(), processor_seconds(), self._theirs()

        def send(link: SealedConnection, member: str) -> int:
            return send_chunk(link, save, files, group, (member, "keeper"), common)

        with ThreadPoolExecutor(3) as pool:
            sent = sum(pool.map(send, self._links, group))
        found = self._figures(since, used, theirs)
        assert sent == self._size
        return found | {"parity": self._asked["parity"], "own": self._asked["own"], "idle": self._idle["own"]}

    def bare(self) -> dict[str, float]:
        """The same bytes, without an agent."""
        since, used, theirs = time.monotonic(), processor_seconds(), self._theirs()
        self._bare.sendall(self._size.to_bytes(8, "little"))
        with (self._slot / "__0_0.distcp").open("rb") as file:
            self._bare.sendfile(file)
        self._bare.recv(1)
        return self._figures(since, used, theirs)

    def _theirs(self) -> float:
        self._asked = self._usage.ask({"ask": USAGE})
        return float(self._asked["seconds"])

    def _figures(self, since: float, used: float, theirs: float) -> dict[str, float]:
        seconds, gigabytes = time.monotonic() - since, self._size / 1e9
        sender, receiver = processor_seconds() - used, self._theirs() - theirs
        return {"rate": gigabytes / seconds, "sender": sender / gigabytes, "receiver": receiver / gigabytes}


def copy(mib: int, rounds: int, keeper: str, ours: str) -> None:
    """Print figures of a way and of the bare one, by turns."""
    sender, found = Sender(mib, keeper), dict[str, list[dict[str, float]]]()
    for number in range(rounds + 3):  # the first ones touch memory for the first time
        for name in (ours, "bare")[:: 1 if number % 2 else -1]:
            found.setdefault(name, []).append(getattr(sender, name)())
    kept = {name: each[3:] for name, each in found.items()}
    print(json.dumps({name: {key: median(e[key] for e in each) for key in each[0]} for name, each in kept.items()}))


def beside(mib: int, rounds: int, keeper: str, log: Path) -> None:
    """Copy in windows of 3 s, and leave training alone in the windows between."""
    sender, windows = Sender(mib, keeper), list[tuple[bool, float, float, float]]()
    for _ in range(3):
        sender.ours()
    for number in range(2 * rounds):
        since, gigabytes = time.monotonic(), 0.0
        while time.monotonic() < since + 3.0:
            if number % 2:
                sender.ours()
                gigabytes += (mib << 20) / 1e9
            else:
                time.sleep(0.1)
        windows.append((bool(number % 2), since, time.monotonic(), gigabytes))
    lines = [tuple(map(float, line.split())) for line in log.read_text().splitlines() if len(line.split()) == 2]
    alone, during, lost = [], [], []
    for is_copy, begin, end, gigabytes in windows:
        steps = [seconds for at, seconds in lines if begin <= at < end]
        (during if is_copy else alone).append(sum(steps) / len(steps))
        if is_copy:
            lost.append((sum(steps) - len(steps) * alone[-1]) / gigabytes)
    print(json.dumps({"ratio": median(d / a for a, d in zip(alone, during, strict=True)), "lost": median(lost)}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=160, help="of the file; three of it have to fit into 512 MiB")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--part", choices=("copy", "parity", "beside", "loss", "lag"), default="")
    parser.add_argument("--role", nargs="*", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, *rest = options.role
        if role == "serve":
            serve(Path(rest[0]))
        elif role != "beside":
            copy(options.mib, options.rounds, rest[0], role)
        else:
            beside(options.mib, options.rounds, rest[0], Path(rest[1]))
        return 0
    if why := obstacle():
        print(f"no hosts can be made here: {why}", file=sys.stderr)
        return 1
    for part in [options.part] if options.part else ["copy", "parity", "beside", "loss", "lag"]:
        if part == "copy":
            show_copy(run(options, "ours"), "ours", "a copy")
        elif part == "parity":
            found = run(options, "parity")
            show_copy(found, "parity", "chunks into parity")
            show_memory(found["parity"], options.mib << 20)
        elif part == "loss":
            show_losses(options.rounds)
        elif part == "lag":
            show_lag()
        else:
            for threads in range(1, (os.cpu_count() or 1) + 1):
                found = run(options, "beside", threads)
                print(f"training with {threads} threads of {os.cpu_count()} cores: steps {found['ratio']:.3f} of those"
                      f" without, {found['lost']:.2f} s of the training's time per GB")  # fmt: skip
    return 0


def run(options: argparse.Namespace, role: str, threads: int = 0) -> dict[str, Any]:
    """Return the output of the sending host."""
    with tempfile.TemporaryDirectory(prefix="fastckpt-replicas-") as made:
        folder = Path(made)
        with Cluster(folder / "cluster", 0, 1) as cluster:
            me, output = str(Path(__file__)), folder / "output"
            cluster.hosts[1].start(me, "--role", "serve", str(folder), output=folder / "served")
            while not (folder / "port").exists() or not (folder / "port").read_text():
                time.sleep(0.05)
            keeper, rest = f"{address_of(1)}:{(folder / 'port').read_text()}", list[str]()
            if threads:
                command = [sys.executable, "-c", TRAINING, str(folder / "log"), str(threads)]
                training = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
                time.sleep(8)
                rest = [str(folder / "log")]
            size = ("--mib", str(options.mib), "--rounds", str(options.rounds))
            code = cluster.hosts[0].start(me, *size, "--role", role, keeper, *rest, output=output).wait()
            if threads:
                training.kill()
                training.wait()
        if code:
            raise SystemExit(output.read_text())
        found: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
        return found


WIDE = ("--way", "fsdp2", "--width", "300000", "--memory", "10", "--disk", "40", "--steps", "100000")


def show_losses(rounds: int) -> None:
    """Lose a host of three with its memory: a spare takes its place; a fresh host, whose agent starts then; nobody."""
    print("| a host of three is lost | counts as lost after | s to the first step of all | steps lost | from | read |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in ("a spare takes its place", "a fresh host takes its place", "the two that are left go on"):
        for timeout in (2, 1):
            found = [loss(kind, timeout) for _ in range(rounds)]
            seconds = [each.seconds for each, _ in found]
            tiers = sorted({tier for each, _ in found for tier in each.tiers.values()})
            lost = sorted(each.lost for each, _ in found)
            print(f"| {kind} | {timeout} s | {median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) |"
                  f" {lost[0]} to {lost[-1]} | {', '.join(tiers)} | {max(reads for _, reads in found)} |",
                  flush=True)  # fmt: skip


def loss(kind: str, timeout: float) -> tuple[Recovery, int]:
    """Return the cost of one loss, and the number of files of durable checkpoints that were read meanwhile."""
    with tempfile.TemporaryDirectory(prefix="fastckpt-replicas-") as made:
        numbers = (0, 1, 2) if "left" in kind else (0, 1, 2, 3)
        with Cluster(Path(made) / "cluster", *numbers) as cluster:
            nodes, flags = ("2:3", ()) if "left" in kind else ("3", ("--fast-spares", "1") if "spare" in kind else ())
            flags = ("--fast-node-timeout", str(timeout), *flags)
            job = NodesJob(cluster, *WIDE, nodes=nodes, meeting=endpoint(0, 1, 2), flags=flags)
            job.launch(0, 1, 2)
            job.do_steps(1)
            if "spare" in kind:
                job.launch(3)
            spare = job.agents.pop(3, None)
            job.do_steps(45)
            job.until(lambda: [*cluster.storage.glob("*/*.distcp")], "a durable checkpoint")
            with StorageReads(cluster.storage) as reads:
                lost = job.lose(1)
                if spare is not None:
                    job.agents[3] = spare
                elif "fresh" in kind:
                    job.launch(3)
                recovery = job.recovered(lost)
                read = {path for path in reads.paths() if path.suffix in DATA}
            job.end()
            return recovery, len(read)


def show_lag() -> None:
    """Save as often as the checkpointer chooses, and count the saves that are newer than the newest copied one."""
    with tempfile.TemporaryDirectory(prefix="fastckpt-replicas-") as made:
        events = Path(made) / "events"
        with Cluster(Path(made) / "cluster", 0, 1, 2) as cluster:
            script, flags = (*WIDE, "--saver", "auto"), ("--fast-events", str(events))
            job = NodesJob(cluster, *script, nodes="3", meeting=endpoint(0, 1, 2), flags=flags)
            job.launch(0, 1, 2)
            job.do_steps(LAG_STEPS, 600)
            job.end()
        saved, copied = (done(whole_lines(events), event) for event in ("saved", "replicated"))
        lags = list[int]()
        for step, at in saved.items():
            newest = max((other for other, then in copied.items() if then <= at), default=0)
            lags.append(sum(newest < other <= step for other in saved))
        print(f"{len(saved)} saves in {LAG_STEPS} steps; when one was complete, the newest that all had copied was")
        for lag in sorted({*lags}):
            print(f"- {lag} saves behind {lags.count(lag)} times")


def done(lines: list[dict[str, Any]], event: str) -> dict[int, float]:
    """Return the times at which all three nodes had done it, by step."""
    found = dict[int, list[float]]()
    for line in lines:
        if line["event"] == event:
            found.setdefault(line["step"], []).append(line["monotonic"])
    return {step: max(times) for step, times in found.items() if len(times) == 3}


def show_memory(found: dict[str, float], size: int) -> None:
    """Print what parity takes of the memory of a host, for saves of this size."""
    pieces = found["own"] - found["idle"]
    print(f"parity: {found['parity'] / 1e6:.0f} MB, {found['parity'] / size:.3f} of a save, two places;"
          f" pieces on their way: {pieces / 1e6:.0f} MB more")  # fmt: skip


def show_copy(found: dict[str, dict[str, float]], ours: str, label: str) -> None:
    """Print a table."""
    print("| | GB/s | processor seconds per GB: sender | receiver |\n| --- | --- | --- | --- |")
    for name, text in ((ours, label), ("bare", "sendfile and recv_into")):
        one = found[name]
        print(f"| {text} | {one['rate']:.2f} | {one['sender']:.3f} | {one['receiver']:.3f} |")
    print(f"\n{found[ours]['rate'] / found['bare']['rate']:.0%} of the bare rate")
    if "digest" in found[ours]:
        print(f"the digest takes the sender {found[ours]['digest']:.3f} s/GB")


if __name__ == "__main__":
    sys.exit(main())
