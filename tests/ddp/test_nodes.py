"""Two nodes, each with a saver: each persists what is its own, and only what both persisted counts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastckpt.config import AGENT_VARIABLE, Settings
from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.engine.saver import Saver
from tests.ddp.conftest import Ranks, Rounds, state

DISK = StorageType.DISK


class Nodes(Ranks):
    """One rank on each of two nodes."""

    def start_nodes(self) -> None:
        self.savers = [Saver(Settings.from_environment()) for _ in range(2)]
        self._rounds = Rounds(2)
        self._monkeypatch.setattr("fastckpt.ddp.agreement", lambda world_size: self._rounds)
        for rank, saver in enumerate(self.savers):
            saver.start()
            values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            values |= {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": 2, AGENT_VARIABLE: saver.address}
            for name, value in values.items():
                self._monkeypatch.setenv(name, str(value))
            self.members.append(DdpCheckpointer(self.directory))

    def save(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            own = {"position": 100 * step + rank}
            assert self.members[rank].save_checkpoint(step, state(step), storage_type=DISK, rank_state=own)
        for rank in ranks:
            assert self.members[rank].wait_latest_checkpoint(60) == step

    def end(self) -> None:
        super().end()
        for saver in self.savers:
            saver.close()
        self.savers = []


@pytest.fixture
def nodes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    nodes = Nodes(directory, monkeypatch)
    nodes.start_nodes()
    yield nodes
    nodes.end()


def positions(nodes: Nodes) -> list[Any]:
    return [member.rank_state.get("position") for member in nodes.members]


def relaunch(nodes: Nodes) -> None:
    nodes.end()
    nodes.start_nodes()


def test_each_rank_gets_its_own_from_storage(nodes: Nodes, said):
    nodes.save(1, 0, 1)
    for _ in range(2):
        assert [loaded["step"] for loaded in nodes.load()] == [1, 1]
        assert positions(nodes) == [100, 101]
        assert {member.loaded_from for member in nodes.members} == {"storage"}
        relaunch(nodes)


def test_what_one_node_has_not_persisted_does_not_count(nodes: Nodes):
    nodes.save(1, 0, 1)
    nodes.save(2, 0)
    assert [loaded["step"] for loaded in nodes.load()] == [1, 1]
    assert positions(nodes) == [100, 101]


def test_nor_what_only_the_other_has(nodes: Nodes):
    nodes.save(1, 0, 1)
    nodes.save(2, 1)
    assert [loaded["step"] for loaded in nodes.load()] == [1, 1]


def test_histories_of_nodes_stay_together(nodes: Nodes):
    """A node that was told of fewer resumes writes the same history as the other."""
    nodes.save(1, 0, 1)
    relaunch(nodes)
    nodes.load()
    nodes.save(2, 0)
    relaunch(nodes)
    nodes.load()
    nodes.save(2, 0, 1)
    relaunch(nodes)
    assert [loaded["step"] for loaded in nodes.load()] == [2, 2]
    assert positions(nodes) == [200, 201]


def test_a_checkpoint_by_its_directory_has_the_parts_of_all_nodes(nodes: Nodes):
    nodes.save(1, 0, 1)
    nodes.save(2, 0, 1)
    assert [loaded["step"] for loaded in nodes.load(nodes.directory / "checkpoint-1")] == [1, 1]
    assert positions(nodes) == [100, 101]
