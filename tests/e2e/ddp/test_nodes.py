"""Two nodes, each with a saver: each persists its own parts, and only steps that both persisted count."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core.config import AGENT_VARIABLE, Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.resume.candidates import CandidateFinder, RequiredFiles
from fastckpt._core.resume.survey import join_on_storage
from fastckpt._core.saver.persistence import node_parts
from fastckpt._core.saver.server import Saver
from fastckpt._core.storage.local import layout, part_files
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.stored import digest
from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.errors import NoLoadableCheckpoint, PersistError
from tests.e2e.ddp.conftest import Ranks, Rounds, flip, on_storage, state, until
from tests.support.counting_calls import FileCalls
from tests.support.live_folders import remove_live
from tests.unit._core.storage.checkpoints import publish

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


class Nodes(Ranks):
    """One rank on each of two nodes, or more."""

    ranks_of_each = 1

    def start_nodes(self, *strategy: Any) -> None:
        self.savers = [Saver(Settings.from_environment()) for _ in range(2)]
        for saver in self.savers:
            saver.start()
        self.start_workers_of_nodes(*strategy)

    def start_workers_of_nodes(self, *strategy: Any) -> None:
        world = len(self.savers) * self.ranks_of_each
        self._rounds = Rounds(world)
        self._monkeypatch.setattr("fastckpt._core.session.agreement", lambda world_size: self._rounds)
        for rank in range(world):
            node, local = divmod(rank, self.ranks_of_each)
            values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self.ranks_of_each}
            values |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": len(self.savers)}
            values |= {AGENT_VARIABLE: self.savers[node].address}
            for name, value in values.items():
                self._monkeypatch.setenv(name, str(value))
            self.members.append(DdpCheckpointer(self.directory, *strategy))

    def save(self, step: int, *ranks: int, path: str = "", kind: StorageType = DISK) -> None:
        for rank in ranks:
            own = {"position": 100 * step + rank}
            assert self.members[rank].save_checkpoint(step, state(step), path, kind, rank_state=own)

    def save_to_memory(self, step: int, *ranks: int) -> None:
        self.save(step, *ranks, kind=MEMORY)

    def restart(self) -> None:
        """The workers of both nodes die, as far as their savers can tell, and others come."""
        for member in self.members:
            member.close()
        self.members = []
        for saver in self.savers:
            saver.breakpoint()
        self.start_workers_of_nodes()

    def resume(self, resume_path: Any = "") -> list[tuple[int, str]]:
        """Step and tier of each rank, which has loaded its own part."""
        found = super().resume(resume_path)
        assert positions(self) == [100 * step + rank for rank, (step, _) in enumerate(found)]
        return found

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
    monkeypatch.setattr(node_parts, "LAST_DEADLINE", 0.5)
    nodes = Nodes(directory, monkeypatch)
    nodes.start_nodes()
    yield nodes
    nodes.end()
    for arena in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():
        assert not any(directory.glob("checkpoint-*")) or is_ahead(nodes)  # kept for what is not durable
        remove_live(arena)


def is_ahead(nodes: Nodes) -> bool:
    """Whether one has written a part that makes no checkpoint yet."""
    return any((nodes.directory / ".fastckpt").glob("parts-*"))


def positions(nodes: Nodes) -> list[Any]:
    return [member.rank_state.get("position") for member in nodes.members]


def relaunch(nodes: Nodes) -> None:
    nodes.end()
    nodes.start_nodes()


def lose_memory(nodes: Nodes) -> None:
    nodes.end()
    for arena in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():
        remove_live(arena)


def test_a_checkpoint_of_two_nodes_is_one_directory_that_plain_torch_reads(nodes, tmp_path):
    path = tmp_path / "user/model.pt"
    for step, where in ((1, ""), (2, str(path)), (3, str(path))):
        nodes.save(step, 0, 1, path=where)
        assert nodes.wait(0, 1) == [step, step]
        assert torch.load(where or nodes.directory / "checkpoint-1/model.pt", weights_only=True)["step"] == step
    place = nodes.directory / "checkpoint-1"
    assert {path.name for path in place.iterdir()} == {"model.pt", "rank_0.pt", "rank_1.pt", "manifest.json"}
    assert torch.equal(torch.load(place / "model.pt", weights_only=True)["weights"], state(1)["weights"])
    own = [torch.load(place / f"rank_{rank}.pt", weights_only=True)["state"] for rank in range(2)]
    assert own == [{"position": 100}, {"position": 101}]
    assert not is_ahead(nodes)
    for _ in range(2):
        assert nodes.resume() == [(3, "storage")] * 2
        relaunch(nodes)
    assert nodes.resume(place) == [(1, "storage")] * 2


def test_the_first_rank_alone_searches_storage_and_each_node_reads_one_manifest(nodes):
    """Calls of the file system grow with the ranks, not with their square. The first node deletes what is old."""
    nodes.end()
    nodes.ranks_of_each, retention = 3, KeepLatestStepStrategy(4, str(nodes.directory))
    nodes.start_nodes(retention)
    for step in (0, 1, 2, 3, 4):
        nodes.save(step, *range(6))
        nodes.wait(0)
    until(lambda: on_storage(nodes.directory) == [1, 2, 3, 4], "retention")
    lose_memory(nodes)
    nodes.start_nodes(retention)
    calls = FileCalls(nodes.directory)
    assert nodes.resume() == [(4, "storage")] * 6
    calls.stop()
    opened = [path for (kind, path), count in calls.made.items() if kind == "open" for _ in range(count)]
    # the first rank knows them all; of another node the first reads the chosen one, and its other ranks take that
    steps = [Path(path).parent.name for path in opened if path.endswith("/manifest.json")]
    assert sorted(step for step in steps if step != ".fastckpt") == [f"checkpoint-{step}" for step in (1, 2, 3, 4, 4)]
    looks = {calls.made["stat", f"{nodes.directory}/checkpoint-2/rank_{rank}.pt"] for rank in range(6)}
    assert looks == {1} and calls.made.total() <= 4 * (6 + 1 + 3) + 6 * 20


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_one_of_two_nodes_has_persisted_does_not_count(nodes, rank):
    nodes.save(1, 0, 1)
    nodes.wait(0, 1)
    nodes.save_alone(2, rank)
    with pytest.raises(TimeoutError):
        nodes.members[rank].wait_latest_checkpoint(0.2)
    assert nodes.resume() == [(1, "storage")] * 2


def test_a_slow_node_keeps_no_slot_of_the_other_node_occupied(nodes):
    """One that is slow does not make this one skip."""
    for step in range(1, 8):
        nodes.save_alone(step, 0)
    assert not any(nodes.directory.glob("checkpoint-*"))
    nodes.save(8, 0, 1)
    assert nodes.wait(1, 0) == [8, 8]
    assert not is_ahead(nodes)


def test_a_slot_is_reused_while_the_other_node_still_persists(nodes):
    nodes.save_alone(1, 1)
    slots.begin(nodes.slot_of(1, 1), slots.SlotBegin(SaveId(1, 2), frozenset({0})))  # as before its images change
    nodes.save(1, 0)
    assert nodes.wait(0, 1) == [1, 1]


def test_a_node_that_waits_long_names_the_node_that_is_missing(nodes, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(node_parts, "DEADLINE", 0.3)
        nodes.save_alone(1, 0)
        with pytest.raises(PersistError, match=r"step 1 of history 1 lacks the parts of nodes \[1\]"):
            nodes.wait(0)
    assert "nodes [1]" in nodes.members[0].save_checkpoint(2, state(2), storage_type=MEMORY).trouble
    nodes.save(3, 0, 1)
    assert nodes.wait(0, 1) == [3, 3]


def test_nodes_with_unlike_counts_of_resumes_write_the_same_history(nodes):
    """A node that was told of fewer resumes writes the same history as the other."""
    nodes.save(1, 0, 1)
    nodes.wait(0, 1)
    relaunch(nodes)
    nodes.load()
    nodes.save_alone(2, 0)
    relaunch(nodes)
    assert [step for step, _ in nodes.resume()] == [1, 1]
    nodes.save(2, 0, 1)
    assert nodes.wait(0, 1) == [2, 2]
    relaunch(nodes)
    assert [step for step, _ in nodes.resume()] == [2, 2]


def test_parts_of_a_dead_job_are_not_joined_with_those_of_the_next(nodes):
    """Neither job has loaded anything, which would have given its saves a name of their own."""
    nodes.save_alone(1, 0)
    lose_memory(nodes)
    nodes.start_nodes()
    nodes.save_alone(1, 1)
    assert not any(nodes.directory.glob("checkpoint-*"))
    assert len(CheckpointDirectory(nodes.directory).scan().gathered) == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_incomplete_parts_are_reported(nodes, said, is_first):
    if not is_first:
        nodes.save(1, 0, 1)
        nodes.wait(0, 1)
    nodes.save_alone(2, 0)
    lose_memory(nodes)
    nodes.start_nodes()
    assert nodes.load() == [{}, {}] if is_first else [loaded["step"] for loaded in nodes.load()] == [1, 1]
    instead = "nothing older is there" if is_first else "step 1 of history 1 is resumed"
    text = f"step 2 of history 1 on storage is not resumed: it lacks the parts of 1 of 2 nodes: 1; {instead}"
    assert said.text.count(text) == 1
    nodes.save(3, 0, 1)
    nodes.wait(0, 1)
    relaunch(nodes)
    nodes.load()
    assert said.text.count("is not resumed") == 1  # what is newer made it useless


def test_parts_untouched_for_long_are_removed_and_reported(nodes, said, monkeypatch):
    nodes.save_alone(2, 1)
    lose_memory(nodes)
    monkeypatch.setattr(part_files, "ABANDONED", -1.0)
    nodes.start_nodes()
    assert nodes.load() == [{}, {}] and is_ahead(nodes)  # another job may be writing it
    nodes.save(1, 0)  # opens a history; not yet whole, or it would make the parts useless, which is not reported
    text = "step 2 of history 1 was never whole, and is removed: it lacks the parts of 1 of 2 nodes: 0"
    until(lambda: text in said.text, "the sweep, once a history has been opened")
    nodes.save(1, 1)
    assert nodes.wait(0, 1) == [1, 1]
    assert said.text.count(text) == 1 and not is_ahead(nodes)


def test_the_end_waits_for_no_part_of_a_save_that_other_nodes_have_gone_beyond(nodes, said, monkeypatch):
    """A node that was stopped by a signal leaves; the others resume what they hold, and save in another history."""
    monkeypatch.setattr(node_parts, "LAST_DEADLINE", 3600.0)
    nodes.save_alone(1, 0)
    publish(CheckpointDirectory(nodes.directory), SaveId(2, 2))
    nodes.members[0].close()
    nodes.savers[0].close()
    assert "in memory only" not in said.text and "lacks the parts" not in said.text


def test_without_locks_all_parts_are_published_at_load(nodes, said, monkeypatch):
    """Only the first node may publish there, and it is gone before the second one has written its part."""
    monkeypatch.setattr(layout, "_locked", lambda lock, mode, *, otherwise: otherwise)
    nodes.save_alone(1, 0)
    nodes.members[0].close()
    nodes.savers[0].close()
    nodes.save_alone(1, 1)
    lose_memory(nodes)
    assert not any(nodes.directory.glob("checkpoint-*"))
    nodes.start_nodes()
    assert nodes.resume() == [(1, "storage")] * 2
    assert "step 1 of history 1 was on storage in unpublished parts, all complete; it is published now" in said.text
    assert not is_ahead(nodes)


@pytest.fixture
def running(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Ranks that have loaded, as scripts do, and so know by which name they save; nothing is flushed by itself."""
    monkeypatch.setenv("FASTCKPT_FLUSH", "no")
    relaunch(nodes)
    assert nodes.load() == [{}, {}]
    return nodes


def test_what_was_saved_before_any_load_is_not_resumed_from_memory(nodes):
    nodes.save(1, 0, 1)
    nodes.wait(0, 1)
    nodes.save_to_memory(2, 0, 1)
    nodes.restart()
    assert nodes.resume()[0][1] == "storage"


def test_a_step_that_one_node_lacks_makes_all_nodes_fall_back(running):
    """All go back to the one before, and the other is given up."""
    running.save_to_memory(1, 0, 1)
    running.save_to_memory(2, 0)
    running.restart()
    assert running.resume() == [(1, "memory")] * 2
    assert {id.step for s in running.slot_of(1, 0).parent.glob("slot-*") if (id := slots.read(s).committed)} == {1}
    running.save_to_memory(2, 0, 1)
    running.restart()
    assert running.resume() == [(2, "memory")] * 2


def test_the_newest_step_that_all_nodes_have_is_flushed(nodes):
    nodes.load()
    nodes.save_to_memory(1, 0, 1)
    nodes.save_to_memory(2, 1)
    nodes.restart()
    assert nodes.resume() == [(1, "memory")] * 2
    until(lambda: on_storage(nodes.directory) == [1], "the flush of step 1")
    nodes.save(2, 0, 1)
    assert nodes.wait(0, 1) == [2, 2]


def clear(path: Path) -> None:
    slots.clear(path.parent)


@pytest.mark.parametrize(
    ("harm", "is_durable"), [(flip, True), (flip, False), (Path.unlink, False), (clear, True), (clear, False)]
)
def test_damaged_memory_of_one_node_is_replaced_from_storage_or_all_fall_back(running, harm, is_durable):
    """Its rank finds the same on storage; else all go back."""
    running.save_to_memory(1, 0, 1)
    running.save(2, 0, 1, kind=DISK if is_durable else MEMORY)
    running.wait(0, 1)
    slot = running.slot_of(2, 1)
    slots.write_digests(slot, slots.read(slot).committed, {"model.pt": digest(slot / "model.pt")})
    running.restart()
    harm(slot / "model.pt")
    assert running.resume() == ([(2, "memory"), (2, "storage")] if is_durable else [(1, "memory")] * 2)


def set_attempt(nodes: Nodes, node: int, step: int, attempt: str) -> None:
    slot = nodes.slot_of(step, node)
    done = slots.read(slot).done[0]
    slots.commit(slot, 0, replace(done, details=done.details | {"attempt": attempt}))


def test_saves_of_one_step_by_unlike_attempts_are_not_joined(running):
    """As of nodes of which one was away while the others went on in a history of the same number."""
    running.save(1, 0, 1)
    running.wait(0, 1)
    running.save_to_memory(2, 0, 1)
    set_attempt(running, 1, 2, "another")
    running.restart()
    assert running.resume() == [(1, "memory")] * 2


def test_parts_that_may_be_of_unlike_saves_are_no_fresh_start(running):
    """As of nodes that had not loaded, or of a job of one node that was started again on two."""
    running.save_to_memory(1, 0, 1)
    for node in (0, 1):
        set_attempt(running, node, 1, "")
    running.restart()
    with pytest.raises(NoLoadableCheckpoint, match="the other nodes may have another of this step"):
        running.load()


@pytest.mark.parametrize("is_enough", [False, True])
def test_a_step_that_all_nodes_hold_is_joined_on_storage_if_memory_is_not_enough(running, is_enough):
    """Node 1 would flush step 2, which node 0 lacks, and no step would be whole."""
    running.save_to_memory(1, 0, 1)
    running.save_to_memory(2, 1)
    running.restart()

    def join(member: DdpCheckpointer, rank: int) -> None:
        link = member._writer.link
        needs = RequiredFiles("model.pt", f"rank_{rank}.pt", () if is_enough else ("what no node has",))
        join_on_storage(CandidateFinder(link, str(running.directory), needs, digests=True), link, running._rounds)
        link.release()

    running.together(join)
    assert on_storage(running.directory) == ([] if is_enough else [1])
