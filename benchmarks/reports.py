"""Measures the cost of many agents' reports to the first one, which answers all: its processor's seconds, and repeats.

    python benchmarks/reports.py [--agents 16 128 1024] [--saves 4]

Agents are threads of one process, each with a connection; the first one is another process, with the server that an
agent has. All report each save at once, until each knows that all hold it.
"""

import argparse
import multiprocessing
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.messages import SECRET, SimulatedAgent
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.saver.peers.agent_peers import AgentPeers
from fastckpt._core.saver.peers.common_saves import CommonSave, HeldReport
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replication import HELD


class ConnectedAgent(SimulatedAgent):
    """An agent that reports over a connection."""

    def __init__(self, member: str, port: int) -> None:
        super().__init__(member)
        self.repeats = 0
        self._link = SealedConnection.connect(f"127.0.0.1:{port}", SECRET, 120.0)

    def settle(self) -> None:
        """Report until no answer asks for more."""
        while self.take(answer := self.report(self._ask)):
            pass
        assert answer.id is not None

    def _ask(self, report: HeldReport, known: CommonSave | None) -> CommonSave:
        request = {"ask": HELD, "directory": "", "known": known.to_json() if known else None, **report.to_json()}
        answer = CommonSave.from_json(self._link.ask(request))
        self.repeats += answer == known
        return answer


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
    results.put((sum(agent.sent for agent in agents), sum(agent.repeats for agent in agents)))


def measure(count: int, saves: int) -> None:
    """Print a row."""
    context = multiprocessing.get_context("fork")
    peers = AgentPeers(_no_memory)
    port = peers.serve()
    peers.assume(PeerRound([Peer(f"agent{number}", f"memory{number}", "") for number in range(count)], 0, SECRET))
    gate, results = context.Barrier(2), context.SimpleQueue()
    others = context.Process(target=send_reports, args=(count, saves, port, gate, results))
    others.start()
    taken = []
    for _ in range(saves):
        gate.wait()
        begin = time.process_time()
        gate.wait()
        taken.append(time.process_time() - begin)
    sent, repeats = results.get()
    others.join()
    peers.close()
    print(f"| {count:,} | {sent / saves / count:.1f} | {repeats / saves / count:.1f} | {taken[-1]:.3f} |", flush=True)


def _no_memory(directory: str) -> Any:
    raise LookupError(directory)


def main() -> None:
    """Print a row for each number of agents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--saves", type=int, default=4)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print("| agents | reports of one, a save | of these in vain | the first one's processor, s for the last save |")
    print("| --- " * 4 + "|")
    for count in options.agents:
        measure(count, options.saves)


if __name__ == "__main__":
    main()
