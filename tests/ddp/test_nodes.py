"""Two nodes, each with a saver: each persists what is its own, and only what both persisted counts."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt.config import AGENT_VARIABLE, Settings
from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.engine import peers
from fastckpt.engine.saver import Saver
from fastckpt.errors import PersistError
from fastckpt.storage.directory import CheckpointDirectory
from tests.ddp.conftest import Ranks, Rounds, state, until

DISK = StorageType.DISK


class Nodes(Ranks):
    """One rank on each of two nodes."""

    def start_nodes(self, *strategy: Any) -> None:
        self.savers = [Saver(Settings.from_environment()) for _ in range(2)]
        self._rounds = Rounds(2)
        self._monkeypatch.setattr("fastckpt.ddp.agreement", lambda world_size: self._rounds)
        for rank, saver in enumerate(self.savers):
            saver.start()
            values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            values |= {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": 2, AGENT_VARIABLE: saver.address}
            for name, value in values.items():
                self._monkeypatch.setenv(name, str(value))
            self.members.append(DdpCheckpointer(self.directory, *strategy))

    def save(self, step: int, *ranks: int, path: str = "") -> None:
        for rank in ranks:
            own = {"position": 100 * step + rank}
            assert self.members[rank].save_checkpoint(step, state(step), path, DISK, rank_state=own)

    def wait(self, *ranks: int) -> list[int | None]:
        return [self.members[rank].wait_latest_checkpoint(60) for rank in ranks]

    def save_alone(self, step: int, rank: int) -> None:
        """The other node does not have this step; what this one has is on storage when this returns."""
        self.save(step, rank)
        found = f".fastckpt/parts-*-{step}-*/part-{rank}.json"
        until(lambda: any(self.directory.glob(found)), f"the part of node {rank}")

    def end(self) -> None:
        super().end()
        with ThreadPoolExecutor(2) as pool:  # as agents do
            list(pool.map(Saver.close, self.savers))
        self.savers = []


@pytest.fixture
def nodes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(peers, "LAST_DEADLINE", 1.0)
    nodes = Nodes(directory, monkeypatch)
    nodes.start_nodes()
    yield nodes
    nodes.end()
    for arena in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():
        assert not any(directory.glob("checkpoint-*")) or _is_ahead(directory)  # kept for what is not durable
        shutil.rmtree(arena)


def _is_ahead(directory: Path) -> bool:
    return any((directory / ".fastckpt").glob("parts-*"))


def positions(nodes: Nodes) -> list[Any]:
    return [member.rank_state.get("position") for member in nodes.members]


def relaunch(nodes: Nodes) -> None:
    nodes.end()
    nodes.start_nodes()


def test_each_rank_gets_its_own_from_storage(nodes: Nodes):
    nodes.save(1, 0, 1)
    assert nodes.wait(0, 1) == [1, 1]
    for _ in range(2):
        assert [loaded["step"] for loaded in nodes.load()] == [1, 1]
        assert positions(nodes) == [100, 101]
        assert {member.loaded_from for member in nodes.members} == {"storage"}
        relaunch(nodes)


def test_a_checkpoint_is_one_directory_that_plain_torch_reads(nodes: Nodes):
    nodes.save(1, 0, 1)
    nodes.wait(0, 1)
    place = nodes.directory / "checkpoint-1"
    assert {path.name for path in place.iterdir()} == {"model.pt", "rank_0.pt", "rank_1.pt", "manifest.json"}
    assert torch.equal(torch.load(place / "model.pt", weights_only=True)["weights"], state(1)["weights"])
    own = [torch.load(place / f"rank_{rank}.pt", weights_only=True)["state"] for rank in range(2)]
    assert own == [{"position": 100}, {"position": 101}]
    assert not _is_ahead(nodes.directory)


def test_a_path_of_the_user(nodes: Nodes, tmp_path: Path):
    path = tmp_path / "user/model.pt"
    for step in (1, 2):
        nodes.save(step, 0, 1, path=str(path))
        assert nodes.wait(0, 1) == [step, step]
        assert torch.load(path, weights_only=True)["step"] == step
    assert [loaded["step"] for loaded in nodes.load()] == [2, 2]
    assert positions(nodes) == [200, 201]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_only_one_node_has_persisted_does_not_count(nodes: Nodes, rank: int):
    nodes.save(1, 0, 1)
    nodes.wait(0, 1)
    nodes.save_alone(2, rank)
    with pytest.raises(TimeoutError):
        nodes.members[rank].wait_latest_checkpoint(0.2)
    assert [loaded["step"] for loaded in nodes.load()] == [1, 1]
    assert positions(nodes) == [100, 101]


def test_it_counts_when_the_other_has_persisted_it_too(nodes: Nodes):
    nodes.save_alone(1, 0)
    nodes.save(1, 1)
    assert nodes.wait(0, 1) == [1, 1]


def test_no_slot_is_kept_for_the_other_node(nodes: Nodes):
    """One that is slow does not make this one skip."""
    for step in range(1, 8):
        nodes.save_alone(step, 0)
    assert not any(nodes.directory.glob("checkpoint-*"))
    nodes.save(8, 0, 1)
    assert nodes.wait(1, 0) == [8, 8]
    assert not _is_ahead(nodes.directory)


def test_a_step_that_one_node_has_skipped_is_overtaken(nodes: Nodes):
    nodes.save_alone(1, 0)
    nodes.save(2, 0, 1)
    assert nodes.wait(0, 1) == [2, 2]
    assert CheckpointDirectory(nodes.directory).gathered() == []


def test_a_node_that_waits_too_long_says_for_whom(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "DEADLINE", 0.3)
    nodes.save_alone(1, 0)
    with pytest.raises(PersistError, match=r"step 1 of history 1 lacks the parts of nodes \[1\]"):
        nodes.wait(0)
    assert "nodes [1]" in nodes.members[0].save_checkpoint(2, state(2)).trouble
    nodes.save(3, 0, 1)
    assert nodes.wait(0, 1) == [3, 3]


def test_histories_of_nodes_stay_together(nodes: Nodes):
    """A node that was told of fewer resumes writes the same history as the other."""
    nodes.save(1, 0, 1)
    nodes.wait(0, 1)
    relaunch(nodes)
    nodes.load()
    nodes.save_alone(2, 0)
    relaunch(nodes)
    assert [loaded["step"] for loaded in nodes.load()] == [1, 1]
    nodes.save(2, 0, 1)
    assert nodes.wait(0, 1) == [2, 2]
    relaunch(nodes)
    assert [loaded["step"] for loaded in nodes.load()] == [2, 2]
    assert positions(nodes) == [200, 201]


def test_parts_of_a_dead_job_do_not_meet_those_of_the_next(nodes: Nodes):
    """Neither job has loaded anything, which would have given its saves a name of their own."""
    nodes.save_alone(1, 0)
    nodes.end()
    for arena in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():
        shutil.rmtree(arena)
    nodes.start_nodes()
    nodes.save_alone(1, 1)
    assert not any(nodes.directory.glob("checkpoint-*"))
    assert len(CheckpointDirectory(nodes.directory).gathered()) == 2


def test_a_checkpoint_by_its_directory_has_the_parts_of_all_nodes(nodes: Nodes):
    for step in (1, 2):
        nodes.save(step, 0, 1)
        nodes.wait(0, 1)
    assert [loaded["step"] for loaded in nodes.load(nodes.directory / "checkpoint-1")] == [1, 1]
    assert positions(nodes) == [100, 101]


def test_the_first_node_retires_old_checkpoints(nodes: Nodes):
    nodes.end()
    nodes.start_nodes(KeepLatestStepStrategy(1, str(nodes.directory)))
    for step in (1, 2, 3):
        nodes.save(step, 0, 1)
        nodes.wait(0, 1)
    until(lambda: len([*nodes.directory.glob("checkpoint-*")]) == 1, "retention")
    assert [stored.id.step for stored in CheckpointDirectory(nodes.directory).checkpoints()] == [3]
