"""The loss of a worker, a host or a link in a job of several nodes, beside torchrun.

Nodes are namespaces of this machine, which needs root (tests/nodes/hosts.py); the job is tests/nodes/train.py.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.benchmark import Benchmark, Contender, Values
from benchmarks.harness.page import shown
from benchmarks.harness.results import Run
from benchmarks.harness.turn import Turn
from tests.nodes.hosts import Cluster, obstacle
from tests.nodes.job import JobEndedError, NodesJob, TooLateError, endpoint
from tests.nodes.recovery import Recovery
from tests.nodes.reference import losses_in, train_uninterrupted
from tests.nodes.storage_reads import DATA, StorageReads

PATIENCE = 90.0
"""Seconds that a job has to come back; the timeout of its collectives is half an hour."""
FIRST = 60
"""Steps before a fault."""
ELASTIC = ("--batches", "2")
"""Has one node do what two do."""
WIDE = ("--way", "fsdp2", "--width", "300000", "--memory", "10", "--disk", "40", "--steps", "100000")
"""Shards of 25 MB on each host."""
LAUNCHERS = {"fastckpt": "fastckpt-run", "torchrun": "torchrun"}


@dataclass(frozen=True)
class Case:
    """A fault, and the job that it befalls.

    Attributes:
        goal: Seconds; None if there is none.
        act: Has the fault happen to the job, and watches it.
        nodes: As --nnodes has it; by default all hosts are needed.
        has_fallbacks: True if another host takes over when the first is lost, where a launcher can do that.
        torchrun: True if torchrun can do the same.
        flags: Of the launcher.
        reference: Ranks of a run that nothing befalls, with whose losses those of the job are compared; 0: none.
    """

    title: str
    goal: float | None
    act: Callable[[NodesJob], Values]
    hosts: tuple[int, ...] = (0, 1)
    nodes: str = ""
    script: tuple[str, ...] = ()
    has_fallbacks: bool = False
    torchrun: bool = True
    flags: tuple[str, ...] = ()
    reference: int = 0


def cost(found: Recovery) -> Values:
    """Return the cost of a fault: seconds, steps done again, and the longest time between two steps of a survivor."""
    return {"seconds": found.seconds, "steps": float(found.lost), "still": min(found.still.values())}


def kill_worker(job: NodesJob) -> Values:
    return cost(job.recovered(job.kill_worker(max(job.agents)), PATIENCE))


def kill_node(job: NodesJob) -> Values:
    job.kill_node(1)
    return cost(job.recovered(job.launch(1), PATIENCE))


def shrink(job: NodesJob) -> Values:
    return cost(job.recovered(job.kill_node(1), PATIENCE))


def grow(job: NodesJob) -> Values:
    shrink(job)
    job.do_steps(FIRST)
    return cost(job.recovered(job.launch(1), PATIENCE))


def isolate(job: NodesJob) -> Values:
    return cost(job.recovered(job.isolate(1, has_carrier=False), PATIENCE))


def interrupt(seconds: float, job: NodesJob) -> Values:
    """Have a link be down for so long; the seconds count from when it is up again."""
    host = job.cluster.hosts[1]
    host.unplug()
    time.sleep(seconds)
    host.plug()
    up, reached = time.monotonic(), job.reached()
    job.do_steps(1, PATIENCE)
    firsts = [
        min(line["at"] for line in job.lines(number) if line["what"] == "step" and line["step"] > reached)
        for number in job.agents
    ]
    return {"seconds": max(firsts) - up}


def lose(number: int, fresh: int | None, job: NodesJob) -> Values:
    """Lose a host with its memory; ``fresh`` is the number of one that comes in its place, if any does."""
    at = job.lose(number)
    if fresh is not None:
        job.cluster.add(fresh)
        at = job.launch(fresh)
    return cost(job.recovered(at, PATIENCE))


def replace(kind: str, job: NodesJob) -> Values:
    """Lose one of three sharded hosts after a durable checkpoint; no tensor may be read from storage."""
    if kind == "spare":
        job.launch(3)
    spare = job.agents.pop(3, None)
    job.do_steps(45)
    job.until(lambda: [*job.cluster.storage.glob("*/*.distcp")], "a durable checkpoint")
    with StorageReads(job.cluster.storage) as reads:
        at = job.lose(1)
        if spare is not None:
            job.agents[3] = spare
        elif kind == "fresh":
            job.launch(3)
        found = cost(job.recovered(at, PATIENCE))
        read = {path for path in reads.paths() if path.suffix in DATA}
    if read:
        raise RuntimeError(f"{len(read)} files of tensors were read from storage")
    return found


THREE, FOUR = (0, 1, 2), (0, 1, 2, 3)


def sharded(title: str, goal: float | None, kind: str, hosts: tuple[int, ...], *flags: str, nodes: str = "3") -> Case:
    """A case of `replace`."""
    return Case(title, goal, partial(replace, kind), hosts, nodes, WIDE, True, False, flags)


CASES = {
    "worker-2": Case("worker killed, 2 nodes", 0.4, kill_worker, reference=2),
    "worker-4": Case("worker killed, 4 nodes", 0.4, kill_worker, FOUR, reference=4),
    "node": Case("processes of a node killed *", 3, kill_node, reference=2),
    "shrink": Case("2 to 1 nodes", 4, shrink, nodes="1:2", script=ELASTIC, reference=1),
    "grow": Case("1 to 2 nodes *", 4, grow, nodes="1:2", script=ELASTIC, reference=1),
    "isolated": Case("link down for good", 4, isolate, nodes="1:2", script=ELASTIC, reference=1),
    "link-1": Case("link down 1 s, from its end", None, partial(interrupt, 1.0), reference=2),
    "link-5": Case(
        "link down 5 s, from its end", 4, partial(interrupt, 5.0), flags=("--max-restarts", "0"), reference=2
    ),
    "store": Case("host of the store lost, 3 to 2 nodes", 4, partial(lose, 0, None), THREE, "2:3", (), True),
    "memory": Case("host lost, saves to memory only *", None, partial(lose, 1, 1), script=("--disk", "100000")),
    "first": Case("one of 3 hosts replaced *", None, partial(lose, 3, 0), (1, 3, 5), reference=3),
    "spare": sharded("FSDP2: a spare takes a place", 2, "spare", FOUR, "--fast-spares", "1"),
    "fresh": sharded("FSDP2: a fresh host does", 3, "fresh", FOUR),
    "left": sharded("FSDP2: two go on", None, "left", THREE, nodes="2:3"),
}


@contextlib.contextmanager
def started(case: Case, launcher: str, turn: Turn) -> Iterator[NodesJob]:
    """A job of a case."""
    with Cluster(turn.folder / "cluster", *case.hosts) as cluster:
        meeting = endpoint(*case.hosts) if case.has_fallbacks and launcher == "fastckpt" else ""
        nodes = case.nodes or str(len(case.hosts))
        job = NodesJob(cluster, *case.script, nodes=nodes, meeting=meeting, launcher=launcher, flags=case.flags)
        job.launch(*(case.hosts if case.script != WIDE else THREE))
        yield job


def measure(key: str, launcher: str, turn: Turn) -> Values:
    """One fault of one job."""
    case = CASES[key]
    try:
        with started(case, launcher, turn) as job:
            job.do_steps(FIRST if case.script != WIDE else 1)
            found = case.act(job)
            job.finish()
            if launcher == "fastckpt" and case.reference:
                compare(job, case, turn)
    except JobEndedError:
        return {"ended": 1.0}
    except TooLateError:
        return {"late": 1.0}
    return found


def compare(job: NodesJob, case: Case, turn: Turn) -> None:
    """Raise RuntimeError if a loss is not that of a run that nothing befell."""
    (folder := turn.folder / "reference").mkdir()
    train_uninterrupted(folder, case.reference, *case.script)
    right = losses_in(folder)
    if wrong := [step for (step, batch), values in job.losses().items() if values != right[step, batch]]:
        raise RuntimeError(f"losses differ in steps {wrong}")


def table(runs: Sequence[Run]) -> str:
    """A row for each case of the newest run."""
    lines = ["| case | torchrun | fastckpt-run | goal |", "| --- " * 4 + "|"]
    for key, case in CASES.items():
        cells = [_cell(runs[-1], f"{name}, {key}") for name in ("torchrun", "fastckpt-run")]
        if set(cells) != {"-"}:
            lines.append(f"| {case.title} | {' | '.join(cells)} | {f'{case.goal:g} s' if case.goal else ''} |")
    return "\n".join(lines)


def _cell(run: Run, name: str) -> str:
    for what, text in (("ended", "the job ends"), ("late", f"not in {PATIENCE:.0f} s")):
        if run.values(f"{name}.{what}"):
            return text
    if not (seconds := run.values(f"{name}.seconds")):
        return "-"
    lost = run.values(f"{name}.steps")
    return f"{shown(statistics.median(seconds))} s" + (f", {max(lost):.0f} lost" if lost else "")


BENCHMARK = Benchmark(
    name="node_faults",
    question="How long is it from a fault to the first step on all nodes?",
    work="Hosts are network namespaces of one machine; a tiny model, one worker a node, storage every 50 steps. * From "
    "the start of the agent.",
    contenders=[
        Contender(f"{name}, {key}", partial(measure, key, launcher), obstacle, (key, launcher) == ("node", "fastckpt"))
        for launcher, name in LAUNCHERS.items()
        for key, case in CASES.items()
        if launcher == "fastckpt" or case.torchrun
    ],
    rounds=1,
    gigabytes=0.0,
    table=table,
)
