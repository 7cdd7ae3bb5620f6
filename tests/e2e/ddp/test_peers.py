"""Two nodes whose agents give each other what they hold: the loss of one's memory costs nothing that was saved."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fastckpt._core.config import Settings
from fastckpt._core.saver.peers.memory_peers import MemoryPeers
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.persistence import node_parts
from fastckpt._core.saver.server import Saver
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import NoLoadableCheckpoint
from tests.e2e.ddp.conftest import Ranks, until
from tests.e2e.ddp.test_nodes import Nodes, positions


class Hosts(Nodes):
    """Nodes that count as hosts of their own, though they have one directory of shared memory."""

    count = 2

    def start_nodes(self) -> None:
        self.savers = [self.make_saver(node) for node in range(self.count)]
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
        """Wait until all know that all hold a step, and that what they have alike was compared."""
        all_of = [peers(saver) for saver in self.savers]
        until(lambda: all((c := each._answer.id) and c.step == step and each.alike for each in all_of), f"step {step}")

    def lose(self, node: int, *also: Path) -> None:
        """A host is lost with its memory, and a fresh one comes in its place; other memory is lost ``also``."""
        for member in self.members:
            member.close()
        arena = self.members[node]._writer.link.arena
        self.members = []
        for lost in (arena, *also):
            shutil.rmtree(lost)
        self.savers[node].close()
        for other in self.savers[:node] + self.savers[node + 1 :]:
            other.breakpoint()
        self.savers[node] = self.make_saver(node)
        self.meet()


def peers(saver: Saver) -> MemoryPeers:
    (coordinator,) = saver._coordinators.values()
    return coordinator.peers


def started(hosts: Hosts, count: int = 2) -> Iterator[Hosts]:
    hosts.count = count
    hosts.start_nodes()
    hosts.load()
    yield hosts
    arenas = [member._writer.link.arena for member in hosts.members]
    hosts.end()
    for arena in arenas:
        shutil.rmtree(arena, ignore_errors=True)


@pytest.fixture
def hosts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    yield from started(Hosts(directory, monkeypatch))


@pytest.fixture
def three_hosts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    yield from started(Hosts(directory, monkeypatch), 3)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_parts, "LAST_DEADLINE", 3.0)
    monkeypatch.setenv("FASTCKPT_FLUSH", "no")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_fresh_host_takes_the_state_from_the_memory_of_the_other(hosts, lost):
    hosts.save_to_memory(5, 0, 1)
    hosts.wait_for_common(5)
    hosts.lose(lost)
    assert hosts.resume() == [(5, "peer" if node == lost else "memory") for node in (0, 1)]
    hosts.restart()
    assert hosts.resume() == [(5, "memory")] * 2  # what was fetched counts as the memory of the fresh host


def test_all_checkpoint_directories_of_a_host_share_the_limit_on_copies(ranks, monkeypatch):
    monkeypatch.setenv("FASTCKPT_REPLICA_MBPS", "5")
    ranks.start()
    with closing(DdpCheckpointer(ranks.directory / "another")):
        assert ranks.saver is not None
        limits = [each.peers._replication._sender._rate for each in ranks.saver._coordinators.values()]
    assert len(limits) == 2 and limits[0] is limits[1] is not None


@pytest.mark.parametrize(("is_stored", "is_allowed"), [(False, False), (True, False), (True, True)])
def test_a_save_without_the_state_of_a_lost_rank_is_resumed_only_with_the_option(
    three_hosts, is_stored, is_allowed, monkeypatch, said
):
    hosts = three_hosts
    if is_stored:
        hosts.save(4, 0, 1, 2)
        assert hosts.wait(0, 1, 2) == [4] * 3
    hosts.save_to_memory(5, 0, 1, 2)
    hosts.wait_for_common(5)
    monkeypatch.setenv("FASTCKPT_ALLOW_LOST_RANK_STATE", str(int(is_allowed)))
    hosts.lose(2, *[hosts.members[node]._writer.link.arena / "kept" for node in (0, 1)])
    if not is_stored:
        says = r"step 5 in memory lacks only the states of ranks \[2\], which no node holds: --fast-allow-lost-rank-sta"
        with pytest.raises(NoLoadableCheckpoint, match=says):
            hosts.load()
    elif not is_allowed:
        assert hosts.resume() == [(4, "memory"), (4, "memory"), (4, "storage")]
        assert "without the rank state" not in said.text
    else:
        assert Ranks.resume(hosts) == [(5, "memory"), (5, "memory"), (5, "peer")]
        assert positions(hosts) == [500, 501, None]
        assert "step 5 is resumed without the rank state of ranks [2]" in said.text
        hosts.save_to_memory(6, 0, 1, 2)  # and training goes on
        hosts.wait_for_common(6)
