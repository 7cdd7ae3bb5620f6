"""Messages of the agents of a job: those that the simulation expects, beside those that real agents have counted.

    python benchmarks/scale.py --part messages [--nodes 4 16] [--saves 10] [--to 1024]

The simulation runs the code of agents: `CommonSaves` for the reports, `place` and `PeerRound` for the copies, the
handlers of the rendezvous for the rounds. Messages by time follow from the constants of the watch and of the signs of
life. Real agents train a tiny model on namespaces of this machine, which needs root (tests/nodes/hosts.py). Reports
that wait for other nodes in vain are sent again; agents count these `repeats` apart. Their jobs have no partners for
large files: these, which keep small ones, too, follow from ids that agents draw.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Any

from benchmarks.rendezvous import Agents
from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.replicas.grouping import ReplicaNode
from fastckpt._core.policy.replicas.placement import place
from fastckpt._core.saver.peers.common_saves import CommonSave, CommonSaves, HeldReport
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt_run.detection.neighbor_watch import BEAT, NEIGHBORS
from fastckpt_run.rendezvous.keep_alive import SELDOM
from fastckpt_run.rendezvous.meeting import Timing
from tests.nodes.hosts import ROOT, Cluster, obstacle
from tests.nodes.job import NodesJob
from tests.support.ports import free_port

EVERY = 8
"""Steps of a real job from one save to the next, and after the last one."""
PACE = 0.1
"""Seconds of rest in each of its steps."""
SECRET = b"a secret of thirty-two characters"


@dataclass(frozen=True)
class NodeCount:
    """Messages of one agent, in the order of group ranks.

    Attributes:
        reports: Reports that it had an answer to, in all.
        copies: Saves that it gave to another node, each counted.
        watch: Messages to those that watch it, and to those that it watches.
        rendezvous: Calls of the store.
    """

    reports: int
    copies: int
    watch: float
    rendezvous: float


@dataclass(frozen=True)
class RealCount:
    """Counts of one real agent.

    Attributes:
        repeats: Reports that were answered with what was known already.
        watched: Seconds from its first round to its end.
        seconds: Seconds from its start to its end.
        saves: Saves of its worker.
    """

    count: NodeCount
    repeats: int
    watched: float
    seconds: float
    saves: int


class SimulatedAgent:
    """An agent that reports what it holds of one directory, and does what it is told."""

    def __init__(self, member: str) -> None:
        self.member, self.sent = member, 0
        self.known: CommonSave | None = None
        self._newest: SaveId | None = None
        self._compared: SaveId | None = None

    def save(self, step: int) -> None:
        """Hold a newer save."""
        self._newest = SaveId(1, step)

    def report(self, ask: Callable[[HeldReport, CommonSave | None], CommonSave]) -> CommonSave:
        """Send a report with what is known; the answer, which may be the same."""
        self.sent += 1
        ids = frozenset([self._newest] if self._newest else [])
        next = self.known.next if self.known else None
        digests = {"state": "a digest"} if self._compared else {}
        return ask(HeldReport(self.member, ids, next, True, self._compared, digests), self.known)

    def take(self, answer: CommonSave) -> bool:
        """Take note of an answer; whether to report again at once."""
        self.known, self._compared = answer, answer.compare or self._compared
        return answer.compare is not None or answer.is_behind(self._newest)


def reports(count: int, saves: int) -> list[int]:
    """The reports that each of so many agents sends from the begin of a round on; the first one reports to itself."""
    agents = [SimulatedAgent(f"agent{number}") for number in range(count)]
    common = CommonSaves([agent.member for agent in agents])
    for step in range(saves + 1):  # the first reports are of nothing
        for agent in agents if step else []:
            agent.save(step)
        _settle(agents, common)
        assert not step or all(agent.known and agent.known.id == SaveId(1, step) for agent in agents)
    return [0, *(agent.sent for agent in agents[1:])]


def _settle(agents: Sequence[SimulatedAgent], common: CommonSaves) -> None:
    """Have all report until no answer asks for more; who has no news yet waits for another one's report."""
    due, waiting = deque(agents), list[SimulatedAgent]()
    while due:
        agent = due.popleft()
        waiting.append(agent)
        if (answer := agent.report(common.report)) != agent.known:
            due += [each for each in waiting if each.take(answer)]
            waiting.clear()


def keepers(partners: Sequence[Sequence[int]]) -> list[int]:
    """Other nodes to which each gives the small files of a save, by the partners of each."""
    peers = [Peer(f"agent{number}", f"memory{number}", "") for number in range(len(partners))]
    rounds = (PeerRound(peers, own, b"", [peers[each] for each in held]) for own, held in enumerate(partners))
    return [len(round.keepers) for round in rounds]


def pairs(count: int) -> list[list[int]]:
    """The partner of each of so many nodes with one copy of its large files, as `--fast-replicas auto` has it."""
    names = [f"{number:06}" for number in range(count)]
    holders = place([ReplicaNode(name, name) for name in names], 1).holders
    return [[int(holder) for holder in holders[name]] for name in names]


def watch(count: int, seconds: float) -> float:
    """Heartbeats to those that follow an agent, one at once, and the farewell over all its connections."""
    links = min(NEIGHBORS, count - 1)
    return links * (1 + floor(seconds / BEAT)) + 2 * links


def signs(seconds: float) -> float:
    """Calls of the store that come by time while a round is held: a sign, a look at one, and two seldom looks more."""
    return (2 + 2 / SELDOM) * seconds / Timing().interval


def round_calls(count: int) -> list[int]:
    """Calls of the store of each agent, by group ranks, from its connection until it holds the first round.

    The handlers are those of agents, in threads of one process, at one store; all come at once. They have a network of
    their own, without a name server: torch's store asks for the name of each client.
    """
    call = f"from benchmarks.messages import hold_round; hold_round({count})"
    boot = ("unshare", "--net", "bash", "-c", 'ip link set lo up; exec "$@"', "bash")
    done = subprocess.run((*boot, sys.executable, "-c", call), cwd=ROOT, check=True, capture_output=True, text=True)
    found: list[int] = json.loads(done.stdout)
    return found


def hold_round(count: int) -> None:
    """Hold a round of so many agents, and print the calls of each."""
    port = free_port()
    agents = [Agents(range(number, number + 1), count, port, SECRET) for number in range(count)]
    handlers = [handler for each in agents for handler in each.handlers]
    handlers[0]._connect()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda handler: handler._connect(), handlers))
        list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
    calls = {
        handler.round.ranks[handler.id]: each.calls.total() for handler, each in zip(handlers, agents, strict=True)
    }
    print(json.dumps([calls[rank] for rank in range(count)]), flush=True)
    for handler in reversed(handlers):  # the first one holds the store
        handler.leave()


def expected(real: Sequence[RealCount]) -> list[NodeCount]:
    """Return the counts that are expected of each agent, by the saves and the times that real ones had.

    Raises ValueError if they have not all done as many saves.
    """
    [saves], count = {each.saves for each in real}, len(real)
    calls = statistics.mean(round_calls(count))  # who comes first sends more, and may have any rank
    agents = zip(reports(count, saves), keepers([[]] * count), real, strict=True)
    return [
        NodeCount(sent, saves * kept, watch(count, each.watched), calls + signs(each.seconds))
        for sent, kept, each in agents
    ]


def counted(count: int, saves: int, folder: Path) -> list[RealCount]:
    """Have real agents of so many nodes do so many saves; what each has counted, by group ranks."""
    with Cluster(folder / f"messages-{count}", *range(count)) as cluster:
        steps = ("--steps", str(EVERY * (saves + 1) - 1), "--memory", str(EVERY), "--disk", "1000000")
        job = NodesJob(cluster, *steps, "--pace", str(PACE), nodes=str(count), flags=("--fast-replicas", "0"))
        for number in range(count):
            job.launch(number, flags=("--fast-events", str(cluster.folder / f"events.{number}")))
        codes = [agent.wait(900) for agent in job.agents.values()]
        assert not any(codes), job.text()
        starts = [_event(job, number, "rendezvous") for number in range(count)]
        found = {start["node"]: _real_count(job, number, start) for number, start in enumerate(starts)}
    return [found[rank] for rank in range(count)]


def _event(job: NodesJob, number: int, name: str) -> dict[str, Any]:
    lines = (job.out / f"events.{number}").read_text().splitlines()
    [found] = (event for event in map(json.loads, lines) if event["event"] == name)
    return dict(found)


def _real_count(job: NodesJob, number: int, start: dict[str, Any]) -> RealCount:
    end = _event(job, number, "node_messages")
    saves = sum(line["what"] == "saved" for line in job.lines(number))
    answered = end["reports"] - end["repeats"]
    count = NodeCount(answered, end["copies"], end["watch"], end["rendezvous"])
    watched = end["monotonic"] - start["monotonic"]
    return RealCount(count, end["repeats"], watched, end["seconds"], saves)


def compare(count: int, saves: int, folder: Path) -> Iterator[str]:
    """The rows of a comparison: a kind of messages, those of all nodes, and the largest difference of a node."""
    real = counted(count, saves, folder)
    model = expected(real)
    for kind in ("reports", "copies", "watch", "rendezvous"):
        both = [(getattr(one, kind), getattr(each.count, kind)) for one, each in zip(model, real, strict=True)]
        sums = [sum(values) for values in zip(*both, strict=True)]
        off = max(abs(is_ - should) / max(should, 1) for should, is_ in both)
        yield f"| {count} | {kind} | {sums[0]:.0f} | {sums[1]} | {'equal' if not off else f'{off:.0%}'} |"
    yield f"| {count} | repeats of reports | | {sum(each.repeats for each in real)} | |"


def growth(most: int, saves: int) -> Iterator[str]:
    """The rows of what an agent sends in jobs of more and more nodes, and what the first one does for all."""
    count = 2
    while count <= most:
        begun = time.process_time()
        sent = reports(count, saves)
        taken = (time.process_time() - begun) / saves
        rates = f"{max(keepers(pairs(count)))} | {watch(count, 3600) / 3600:.1f} | {signs(1):.1f}"
        yield f"| {count:,} | {max(sent) / saves:.1f} | {rates} | {sum(sent) / saves:,.0f} | {taken * 1e3:.1f} |"
        count *= 2


def print_tables(counts: Sequence[int], saves: int, most: int) -> None:
    """Print what an agent sends by the number of nodes, and the comparisons with real agents."""
    print("| nodes | reports a save | copies a save | watch, 1/s | rendezvous, 1/s | to the first, a save | its ms |")
    print("| --- " * 7 + "|")
    for row in growth(most, saves):
        print(row, flush=True)
    if why := obstacle():
        print(why)
        return
    print("\n| nodes | messages | simulated, all | counted, all | largest difference of a node |")
    print("| --- " * 5 + "|")
    with tempfile.TemporaryDirectory(prefix="fastckpt-messages-") as folder:
        for count in counts:
            for row in compare(count, saves, Path(folder)):
                print(row, flush=True)
