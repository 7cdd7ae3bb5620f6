"""Two nodes whose agents give each other what they hold: the loss of one's memory costs nothing that was saved."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.config import Settings
from fastckpt._core.saver.peers.memory_peers import MemoryPeers
from fastckpt._core.saver.peers.replication import Peer, PeerRound
from fastckpt._core.saver.persistence import node_parts
from fastckpt._core.saver.server import Saver
from tests.e2e.ddp.conftest import until
from tests.e2e.ddp.test_nodes import Nodes


class Hosts(Nodes):
    """Two nodes that count as hosts of their own, though they have one directory of shared memory."""

    def start_nodes(self) -> None:
        self.savers = [self.make_saver(node) for node in range(2)]
        self.meet()

    def make_saver(self, node: int) -> Saver:
        saver = Saver(Settings.from_environment())
        saver.slot = node
        saver.start()
        return saver

    def meet(self) -> None:
        """A new round of both agents, and new workers."""
        self.round = getattr(self, "round", 0) + 1
        hosts = [f"127.0.0.1:{saver.serve_peers()}" for saver in self.savers]
        peers = [Peer(f"{self.round}-{node}", f"memory {node}", host) for node, host in enumerate(hosts)]
        for node, saver in enumerate(self.savers):
            saver.meet(PeerRound(peers, node, b"secret"))
        self.start_workers_of_nodes()

    def wait_for_common(self, step: int) -> None:
        """Wait until both know that both hold a step, and that what they have alike was compared."""
        both = [peers(saver) for saver in self.savers]
        until(lambda: all((c := each._answer.id) and c.step == step and each.alike for each in both), f"step {step}")

    def lose(self, node: int) -> None:
        """A host is lost with its memory, and a fresh one comes in its place."""
        for member in self.members:
            member.close()
        arena = self.members[node]._writer.link.arena
        self.members = []
        shutil.rmtree(arena)
        self.savers[node].close()
        self.savers[1 - node].breakpoint()
        self.savers[node] = self.make_saver(node)
        self.meet()


def peers(saver: Saver) -> MemoryPeers:
    (coordinator,) = saver._coordinators.values()
    return coordinator.peers


@pytest.fixture
def hosts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setattr(node_parts, "LAST_DEADLINE", 3.0)
    monkeypatch.setenv("FASTCKPT_FLUSH", "no")
    hosts = Hosts(directory, monkeypatch)
    hosts.start_nodes()
    hosts.load()
    yield hosts
    arenas = [member._writer.link.arena for member in hosts.members]
    hosts.end()
    for arena in arenas:
        shutil.rmtree(arena, ignore_errors=True)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_fresh_host_takes_the_state_from_the_memory_of_the_other(hosts: Hosts, lost: int):
    hosts.save_to_memory(5, 0, 1)
    hosts.wait_for_common(5)
    hosts.lose(lost)
    assert hosts.resume() == [(5, "peer" if node == lost else "memory") for node in (0, 1)]
    hosts.restart()
    assert hosts.resume() == [(5, "memory")] * 2  # what was fetched counts as the memory of the fresh host
