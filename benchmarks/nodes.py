"""Measures the loss of a worker, a host or a link in a job of several nodes, beside torchrun where it can do the case.

    python benchmarks/nodes.py [CASE ...] [--repeats 3] [--launchers torchrun fastckpt] [--keep FOLDER]
    python benchmarks/nodes.py --messages 2 4 16 [--seconds 60]

Nodes are namespaces of this machine, which needs root (tests/nodes/hosts.py). The job is tests/nodes/train.py: a tiny
model on one worker a node. Seconds are those from the fault, or from the start of an agent where the case says so, to
the first step of the resumed job on all its nodes. Launchers take turns. The losses of
every step of fastckpt-run's jobs are compared, bit by bit, with those of a run that nothing befell.

With --messages jobs of so many nodes train for a while, and the messages that their agents have counted are printed.
"""

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.nodes.hosts import Cluster, obstacle
from tests.nodes.job import JobEndedError, NodesJob, TooLateError, endpoint
from tests.nodes.recovery import Recovery
from tests.nodes.reference import losses_in, train_uninterrupted

PATIENCE = 90.0
"""Seconds that a job has to come back; the timeout of its collectives is half an hour."""
FIRST = 60
"""Steps before a fault."""
ELASTIC = ("--batches", "2")
"""Has one node do what two do."""
MEMORY_ONLY = ("--disk", "100000")
LAUNCHERS = {"torchrun": "torchrun", "fastckpt": "fastckpt-run"}


@dataclass(frozen=True)
class Outcome:
    """Effect of one fault.

    Attributes:
        seconds: Until the job went on; None if it did not.
        note: Other facts that count.
    """

    seconds: float | None
    note: str


@dataclass(frozen=True)
class Case:
    """A fault, and the job that it befalls.

    Attributes:
        act: Has the fault happen to the job, and watches it.
        nodes: As --nnodes has it; by default all hosts are needed.
        has_fallbacks: True if another host takes over when the first is lost, where a launcher can do that.
        torchrun: True if a script can save such a model by torch.save on the first rank.
        flags: Of the launcher.
    """

    title: str
    goal: str
    act: Callable[[NodesJob], Outcome]
    hosts: tuple[int, ...] = (0, 1)
    nodes: str = ""
    script: tuple[str, ...] = ()
    has_fallbacks: bool = False
    torchrun: bool = True
    flags: tuple[str, ...] = ()

    @property
    def has_reference(self) -> bool:
        """Return whether each step does the same on all numbers of nodes that the job may have."""
        return not self.nodes or "--batches" in self.script

    def reference(self) -> tuple[int, tuple[str, ...]]:
        """Ranks and arguments of the run to compare with."""
        return (1 if "--batches" in self.script else len(self.hosts)), self.script


def outcome(found: Recovery) -> Outcome:
    """All that a recovery cost."""
    tiers = "/".join(sorted({tier or "none" for tier in found.tiers.values()}))
    starts = max(found.starts.values())
    note = f"{found.lost} steps lost, from {tiers}" + (f", {starts} starts" if starts > 1 else "")
    return Outcome(found.seconds, note)


def kill_worker(job: NodesJob) -> Outcome:
    return outcome(job.recovered(job.kill_worker(max(job.agents)), PATIENCE))


def kill_node(job: NodesJob) -> Outcome:
    job.kill_node(1)
    return outcome(job.recovered(job.launch(1), PATIENCE))


def shrink(job: NodesJob) -> Outcome:
    return outcome(job.recovered(job.kill_node(1), PATIENCE))


def grow(job: NodesJob) -> Outcome:
    shrink(job)
    job.do_steps(FIRST)
    found = job.recovered(job.launch(1), PATIENCE)
    joined = outcome(found)
    return Outcome(joined.seconds, f"{joined.note}; the survivor stood still {found.still[0]:.1f} s")


def isolate(job: NodesJob) -> Outcome:
    return outcome(job.recovered(job.isolate(1, has_carrier=False), PATIENCE))


def interrupt(seconds: float) -> Callable[[NodesJob], Outcome]:
    """A link that is down for so long; the seconds count from when it is up again."""

    def act(job: NodesJob) -> Outcome:
        host = job.cluster.hosts[1]
        host.unplug()
        time.sleep(seconds)
        host.plug()
        up = time.monotonic()
        reached = job.reached()
        job.do_steps(1, PATIENCE)
        firsts = [
            min(line["at"] for line in job.lines(number) if line["what"] == "step" and line["step"] > reached)
            for number in job.agents
        ]
        starts = [line for number in job.agents for line in job.lines(number) if line["what"] == "started"]
        return Outcome(max(firsts) - up, f"{len(starts) - len(job.agents)} starts")

    return act


def lose(number: int, fresh: int | None = None) -> Callable[[NodesJob], Outcome]:
    """A host is lost with its memory; ``fresh`` is the number of one that comes in its place, if any does."""

    def act(job: NodesJob) -> Outcome:
        at = job.lose(number)
        if fresh is not None:
            job.cluster.add(fresh)
            at = job.launch(fresh)
        return outcome(job.recovered(at, PATIENCE))

    return act


THREE = (1, 3, 5)
CASES = {
    "worker-2": Case("worker killed, 2 nodes", "<= 0.4 s", kill_worker),
    "worker-4": Case("worker killed, 4 nodes", "<= 0.4 s", kill_worker, (0, 1, 2, 3)),
    "node": Case("processes of a node killed: from the start of its next agent", "<= 3 s, from memory", kill_node),
    "shrink": Case("2 -> 1 nodes, default options", "<= 4 s, from memory", shrink, nodes="1:2", script=ELASTIC),
    "grow": Case("1 -> 2 nodes, default options: from the start of the agent",
                 "<= 4 s, from memory; survivor still <= 1 s", grow, nodes="1:2", script=ELASTIC),
    "isolated": Case("link down for good", "<= 4 s", isolate, nodes="1:2", script=ELASTIC),
    "link-1": Case("link down 1 s: from when it is up", "no restart", interrupt(1.0)),
    "link-5": Case("link down 5 s, with --max-restarts 0: from when it is up", "<= 4 s, no restart counted",
                   interrupt(5.0), flags=("--max-restarts", "0")),
    "store": Case("host of the store and of rank 0 lost, 3 -> 2 nodes", "<= 4 s, the job goes on", lose(0), (0, 1, 2),
                  nodes="2:3", has_fallbacks=True),
    "ddp": Case("host lost with its memory, only memory saves: from the start of the agent of a fresh one",
                "nothing lost beyond the last memory save", lose(1, 1), script=MEMORY_ONLY),
    "fsdp2": Case("the same, FSDP2, with saves to storage every 20 steps", "from the last durable save", lose(1, 1),
                  script=("--way", "fsdp2", "--disk", "20"), torchrun=False),
    "first": Case("one of 3 hosts replaced by one that sorts first", "survivors from memory", lose(3, 0), THREE),
    "between": Case("by one that sorts between", "survivors from memory", lose(3, 2), THREE),
    "last": Case("by one that sorts last", "survivors from memory", lose(3, 6), THREE),
}  # fmt: skip


class Bench:
    """Jobs of the cases in a folder, and the runs to compare them with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = itertools.count()
        self.wrong: list[str] = []

    def run(self, key: str, launcher: str) -> Outcome:
        """One fault of one job."""
        case = CASES[key]
        with Cluster(self._folder / f"{key}-{launcher}-{next(self._names)}", *case.hosts) as cluster:
            meeting = endpoint(*case.hosts) if case.has_fallbacks and launcher == "fastckpt" else ""
            nodes = case.nodes or str(len(case.hosts))
            job = NodesJob(cluster, *case.script, nodes=nodes, meeting=meeting, launcher=launcher, flags=case.flags)
            try:
                job.launch(*case.hosts)
                job.do_steps(FIRST)
                found = case.act(job)
                job.do_steps(5)
                job.end()
            except JobEndedError as error:
                say(str(error).partition("\n")[0])
                return Outcome(None, "the job ends")
            except TooLateError as error:
                say(str(error).partition("\n")[0])
                return Outcome(None, f"not in {PATIENCE:.0f} s")
            if launcher == "fastckpt" and case.has_reference:
                self._compare(key, job)
            return found

    def _compare(self, key: str, job: NodesJob) -> None:
        ranks, script = CASES[key].reference()
        folder = self._folder / "-".join(["reference", str(ranks), *(word.strip("-") for word in script)])
        if not folder.exists():
            folder.mkdir()
            train_uninterrupted(folder, ranks, *script)
        right = losses_in(folder)
        self.wrong += [
            f"{key}: step {step}" for (step, batch), values in job.losses().items() if values != right[step, batch]
        ]


def messages_of(count: int, seconds: float, folder: Path) -> None:
    """Print what each agent of a job of so many nodes sends while nothing happens, but saves every second."""
    with Cluster(folder / f"messages-{count}", *range(count)) as cluster:
        job = NodesJob(cluster, "--steps", "1000000", "--pace", "0.1", "--memory", "8", nodes=str(count))
        for number in range(count):
            job.launch(number, flags=("--fast-events", str(cluster.folder / f"events.{number}")))
        job.do_steps(5, 600)
        time.sleep(seconds)
        job.end()
        saves = sum(line["what"] == "saved" for line in job.lines(0))
        paths = cluster.folder.glob("events.*")
        events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    ends = [event for event in events if event["event"] == "node_messages"]
    assert len(ends) == count
    for kind in ("rendezvous", "watch", "reports", "copies"):
        rates = sorted(end[kind] / end["seconds"] for end in ends)
        total = sum(end[kind] for end in ends)
        print(f"| {count} | {kind} | {total} | {statistics.mean(rates):.2f} | {rates[-1]:.2f} | {total / saves:.1f} |")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cell(found: list[Outcome]) -> str:
    """Summarize all repeats: the seconds of those that went on, and each note once."""
    if not found:
        return "-"
    seconds = [each.seconds for each in found if each.seconds is not None]
    notes = "; ".join(dict.fromkeys(each.note for each in found))
    if not seconds:
        return notes
    spread = f" ({min(seconds):.1f}-{max(seconds):.1f})" if len(seconds) > 1 else ""
    return f"{statistics.median(seconds):.1f}{spread} s: {notes}"


def print_table(results: dict[tuple[str, str], list[Outcome]], keys: list[str], launchers: list[str]) -> None:
    print("| case | " + " | ".join(LAUNCHERS[launcher] for launcher in launchers) + " | goal |")
    print("| --- " * (len(launchers) + 2) + "|")
    for key in keys:
        cells = " | ".join(cell(results.get((key, launcher), [])) for launcher in launchers)
        print(f"| {CASES[key].title} | {cells} | {CASES[key].goal} |")


@contextlib.contextmanager
def working_folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True)
        yield kept.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="fastckpt-nodes-") as made:
        yield Path(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--launchers", nargs="+", default=[*LAUNCHERS], choices=[*LAUNCHERS])
    parser.add_argument("--keep", type=Path, help="new folder for what the jobs write; default: one that is removed")
    parser.add_argument("--messages", nargs="+", type=int, default=[], help="numbers of nodes whose messages to count")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which they train then")
    options = parser.parse_args()
    keys = options.cases or [*CASES]
    if unknown := set(keys) - set(CASES):
        parser.error(f"no cases: {', '.join(sorted(unknown))}")
    if why := obstacle():
        parser.error(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # hosts end with this process
    results: dict[tuple[str, str], list[Outcome]] = {}
    with working_folder(options.keep) as folder:
        if options.messages:
            print("| nodes | messages | all | a second and agent, mean | most of an agent | all, a save |")
            print("| --- " * 6 + "|")
            for count in options.messages:
                messages_of(count, options.seconds, folder)
            return 0
        bench = Bench(folder)
        for turn, key, launcher in itertools.product(range(options.repeats), keys, options.launchers):
            if launcher == "torchrun" and not CASES[key].torchrun:
                continue
            found = bench.run(key, launcher)
            results.setdefault((key, launcher), []).append(found)
            say(f"{turn + 1}/{options.repeats} {key}, {LAUNCHERS[launcher]}: {cell([found])}")
    print_table(results, keys, options.launchers)
    print(
        "\nlosses: "
        + (f"WRONG: {'; '.join(bench.wrong)}" if bench.wrong else "bitwise those of a run without faults, all")
    )
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
