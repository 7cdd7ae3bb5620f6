"""Reports of saves to the first agent of a job: simulated, or over connections as those of real agents."""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.suite.growth._rendezvous_agents import SECRET, more_files
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.saver.peers.agent_peers import AgentPeers
from fastckpt._core.saver.peers.common_saves import CommonSave, CommonSaves, HeldReport
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replication import HELD

SAVES = 4


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


class ConnectedAgent(SimulatedAgent):
    """An agent that reports over a connection."""

    def __init__(self, member: str, port: int) -> None:
        super().__init__(member)
        self._link = SealedConnection.connect(f"127.0.0.1:{port}", SECRET, 120.0)

    def settle(self) -> None:
        """Report until no answer asks for more."""
        while self.take(answer := self.report(self._ask)):
            pass
        assert answer.id is not None

    def _ask(self, report: HeldReport, known: CommonSave | None) -> CommonSave:
        request = {"ask": HELD, "directory": "", "known": known.to_json() if known else None, **report.to_json()}
        return CommonSave.from_json(self._link.ask(request))


def send_reports(count: int, saves: int, port: int, gate: Any, results: Any) -> None:
    """Have all agents report each save, when the gate opens."""
    threading.stack_size(256 << 10)
    agents = [ConnectedAgent(f"agent{number}", port) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        for step in range(1, saves + 1):
            for agent in agents:
                agent.save(step)
            gate.wait()
            list(pool.map(ConnectedAgent.settle, agents))
            gate.wait()
    results.put(sum(agent.sent for agent in agents))


def processor_of_first(count: int) -> dict[str, float]:
    """Processor seconds of the first agent for the last save, which so many report at once."""
    more_files()
    context = multiprocessing.get_context("fork")
    peers = AgentPeers(_no_memory)
    port = peers.serve()
    peers.assume(PeerRound([Peer(f"agent{number}", f"memory{number}", "") for number in range(count)], 0, SECRET))
    gate, results = context.Barrier(2), context.SimpleQueue()
    others = context.Process(target=send_reports, args=(count, SAVES, port, gate, results))
    others.start()
    taken = []
    for _ in range(SAVES):
        gate.wait()
        begin = time.process_time()
        gate.wait()
        taken.append(time.process_time() - begin)
    sent = results.get()
    others.join()
    peers.close()
    return {"processor": taken[-1], "reports": sent / SAVES / count}


def _no_memory(directory: str) -> Any:
    raise LookupError(directory)
