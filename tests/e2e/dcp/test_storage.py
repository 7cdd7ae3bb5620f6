"""dcp.save, dcp.async_save and dcp.load with our writer and reader, in a job of one rank."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import WriteResult

from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import slots_of
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.dcp import SharedMemoryReader, SharedMemoryWriter, StorageType
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import ConfigError, NoLoadableCheckpoint
from tests.e2e.dcp.states import same
from tests.e2e.ddp.conftest import flip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state(value: float, text: str = "") -> dict[str, Any]:
    flat = torch.full((1000,), float(value))
    return {
        "model": {"weight": flat[:600].view(20, 30), "bias": flat[600:], "columns": torch.full((4, 6), value)[:, 1:3]},
        "steps": [torch.tensor(value), int(value)],
        "text": text,
    }


def save(writer: SharedMemoryWriter, step: int, value: Any = None, **options: Any) -> Metadata:
    return dcp.save(value or state(step), storage_writer=writer, checkpoint_id=str(step), **options)


class Failing(DefaultSavePlanner):
    """Has no data for one entry."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "text":
            raise RuntimeError("no data")
        return super().resolve_data(write_item)


def load(reader: SharedMemoryReader, checkpoint_id: Any = None) -> dict[str, Any]:
    loaded = state(-1)
    dcp.load(loaded, storage_reader=reader, checkpoint_id=checkpoint_id)
    return loaded


@pytest.mark.parametrize("caches", [False, True])
def test_the_last_dcp_save_is_loaded_from_memory(writer: SharedMemoryWriter, reader: SharedMemoryReader, caches: bool):
    """Also if DCP caches plans, of a rank that has nothing, and by stock torch."""
    assert reader.find() is None
    dcp.save({}, storage_writer=writer, checkpoint_id="0")
    dcp.load({}, storage_reader=reader)
    assert writer.result and reader.loaded_step == 0
    for step in (1, 2, 3):
        save(writer, step, planner=DefaultSavePlanner(enable_plan_caching=caches))
        assert writer.result and writer.result.step == step
    assert reader.find() == 3
    found = load(reader)
    assert same(found, state(3))
    assert (reader.loaded_step, reader.loaded_from) == (3, "memory")
    newest = max(slots_of(writer._writer.link.arena), key=lambda slot: (slot / ".begin").stat().st_mtime_ns)
    dcp.load(loaded := state(-1), checkpoint_id=newest)
    assert same(loaded, state(3))
    found["model"]["weight"].fill_(9)
    assert same(load(reader), state(3)), "what was loaded is no part of shared memory"
    for step in range(4, 8):
        save(writer, step)
    assert bool((found["model"]["weight"] == 9).all()) and bool((found["model"]["bias"] == 3).all())


def test_the_shards_of_one_of_two_nodes_are_no_reason_to_start_afresh(
    writer: SharedMemoryWriter, reader: SharedMemoryReader
):
    writer.storage_type = StorageType.MEMORY
    save(writer, 1)
    slot = next(slot for slot in writer._writer.link.arena.glob("slot-*") if slots.read(slot).committed)
    done = slots.read(slot).done[0]
    of_two = {"world_size": 2, "nodes": 2, "attempt": "a"}
    slots.commit(slot, 0, replace(done, details=done.details | of_two))
    with pytest.raises(NoLoadableCheckpoint, match="step 1 of history 1 in memory of node 0"):
        reader.find()
    slots.commit(slot, 0, done)
    assert reader.find() == 1


def test_a_dcp_step_is_loaded_by_any_of_its_names(writer: SharedMemoryWriter, reader: SharedMemoryReader):
    writer.storage_type, run = StorageType.MEMORY, writer._writer.directory
    for step in (1, 2, 3):
        dcp.save(state(step), storage_writer=writer, checkpoint_id=Path(run, f"checkpoint-{step}"))
    for name in (f"{run}/checkpoint-2", f"{run}/checkpoint-2/", f"{run}/step-2", "checkpoint-2", "2"):
        assert same(load(reader, name), state(2)), name
        assert same(load(reader), state(3)), "what was asked for once must not be loaded ever after"
    load(reader, "1")
    save(writer, 2, state(20))
    assert same(load(reader), state(20)), "what is saved after a load is newer than all before"


def test_a_dcp_save_that_is_refused_or_fails_leaves_the_one_before_and_can_be_repeated(
    tmp_path: Path, writer: SharedMemoryWriter, reader: SharedMemoryReader
):
    with pytest.raises(CheckpointException, match="no such checkpoint yet"):
        load(reader)
    save(writer, 1)
    elsewhere = "/elsewhere/checkpoint-1", "/elsewhere/step-1", f"{writer._writer.directory}/1", "run", ""
    for error, why, checkpoint_id, options in (
        *((ConfigError, "checkpoint-<step>", name, {}) for name in elsewhere),
        (CheckpointException, "which step", None, {}),
        (ConfigError, "use_collectives", "2", {"use_collectives": False}),
        (CheckpointException, "was saved before", "1", {}),
        (CheckpointException, "comes after step 1", "0", {}),
    ):
        with pytest.raises(error, match=why):
            dcp.save(state(5), storage_writer=writer, checkpoint_id=checkpoint_id, **options)
    with pytest.raises(CheckpointException, match="no such checkpoint yet"):
        load(reader, "5")
    for _ in range(3):
        assert same(load(reader), state(1))
        with pytest.raises(CheckpointException, match="no data"):
            save(writer, 2, planner=Failing())
    assert same(load(reader), state(1))
    save(writer, 2, state(20))
    with pytest.raises(CheckpointException, match="was saved before"):
        save(writer, 2, state(30))
    assert same(load(reader), state(20))
    save(writer, 3)
    assert writer.wait() == 3
    assert [stored.id.step for stored in CheckpointDirectory(tmp_path / "run").checkpoints()] == [3, 2, 1]
    with pytest.raises(TypeError, match="THREAD"):
        pickle.dumps(writer)
    assert AsyncCheckpointerType.THREAD.value == "thread"
    writer.close()
    with pytest.raises(CheckpointException, match="the checkpointer is closed"):
        save(writer, 4)


@pytest.mark.parametrize("reason", ["loaded meanwhile", "no slot is free"])
def test_a_save_amid_which_ranks_load_or_that_another_rank_lacks_is_skipped(
    writer: SharedMemoryWriter, reader: SharedMemoryReader, reason: str
):
    save(writer, 1)
    write = writer.write_data

    def disturbed(*arguments: Any) -> Any:
        written = write(*arguments)
        if reason == "loaded meanwhile":
            reader.find()
        else:
            written.value().append(WriteResult(MetadataIndex("__1_0.distcp"), 0, reason))
        return written

    writer.write_data = disturbed  # type: ignore[method-assign]
    save(writer, 2)
    assert writer.result is not None and not writer.result and reason in writer.result.reason
    writer.write_data = write  # type: ignore[method-assign]
    assert same(load(reader), state(1))
    save(writer, 2)
    assert same(load(reader), state(2))


def test_a_dcp_load_finds_a_damaged_byte_in_memory_and_on_storage(tmp_path: Path):
    with SharedMemoryWriter(tmp_path) as writer:
        for step in (1, 2):
            save(writer, step)
        writer.wait()
        for slot in slots_of(writer._writer.link.arena):
            if (slot / ".digests").exists():
                flip(slot / ".metadata", 100)
        reader = SharedMemoryReader(writer)
        assert same(load(reader), state(2)) and reader.loaded_from == "storage"
    bad = tmp_path / "checkpoint-2" / "__0_0.distcp"
    flip(bad, bad.read_bytes().index(torch.tensor([2.0] * 4).numpy().tobytes()))
    with SharedMemoryWriter(tmp_path) as writer:
        reader = SharedMemoryReader(writer)
        with pytest.raises(CheckpointException, match="is damaged: its xxh3-128"):
            load(reader, tmp_path / "other" / ".." / "checkpoint-2")
        assert same(load(reader), state(1)) and reader.loaded_step == 1
    assert len(list((tmp_path / ".fastckpt").glob("quarantine-*"))) == 1


def test_a_load_of_more_names_than_were_saved_keeps_those_if_the_planner_is_not_strict(
    writer: SharedMemoryWriter, reader: SharedMemoryReader
):
    save(writer, 1, {"w": torch.ones(3), "unwanted": torch.ones(3)})
    loaded = {"w": torch.zeros(3), "more": torch.full((3,), 5.0)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: more"):
        dcp.load(dict(loaded), storage_reader=reader)
    dcp.load(loaded, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(loaded, {"w": torch.ones(3), "more": torch.full((3,), 5.0)})


@pytest.mark.parametrize("never_loads", [False, True])
def test_a_load_that_fails_or_never_comes_blocks_no_later_saves(
    writer: SharedMemoryWriter, reader: SharedMemoryReader, never_loads: bool
):
    for step in (1, 2, 3):
        save(writer, step)
    assert reader.find() == 3
    if not never_loads:
        with pytest.raises(CheckpointException, match="Missing key"):
            dcp.load({"unknown": torch.zeros(3)}, storage_reader=reader)
    for step in (4, 5, 6, 7):
        save(writer, step)
        assert writer.result, "nothing is kept in memory for a load that is over"
    assert same(load(reader), state(7)), "what is saved since is newer"


def test_dcp_with_checkpoints_of_another_kind_is_an_error_and_no_fresh_start(tmp_path: Path):
    with DdpCheckpointer(tmp_path) as other:
        other.save_checkpoint(1, {"w": torch.ones(3)}, storage_type=StorageType.DISK)
        other.wait_latest_checkpoint()
    with SharedMemoryWriter(tmp_path) as writer:
        with pytest.raises(NoLoadableCheckpoint, match="checkpoint-1 is of another kind"):
            SharedMemoryReader(writer).find()
        save(writer, 2)
    with DdpCheckpointer(tmp_path) as other:
        assert other.load_checkpoint()["w"].sum() == 3


def test_a_stock_checkpoint_or_one_without_its_manifest_is_kept_and_no_fresh_start(
    tmp_path: Path, writer: SharedMemoryWriter, reader: SharedMemoryReader
):
    stock = tmp_path / "run" / "checkpoint-3"
    dcp.save(state(3), checkpoint_id=stock)
    with pytest.raises(NoLoadableCheckpoint, match=r"checkpoint-3, which torch\.distributed\.checkpoint"):
        reader.find()
    dcp.load(loaded := state(-1), checkpoint_id=stock)
    assert same(loaded, state(3))
    save(writer, 4)
    writer.close()
    (tmp_path / "run" / "checkpoint-4" / "manifest.json").unlink()
    with SharedMemoryWriter(tmp_path / "run") as again, pytest.raises(NoLoadableCheckpoint, match="no manifest"):
        SharedMemoryReader(again).find()


def test_dcp_checkpoints_are_saved_to_and_loaded_from_a_url(tmp_path: Path):
    url = f"memory://{tmp_path.name}/run"
    for step in (1, 2):
        with SharedMemoryWriter(url) as writer:
            reader = SharedMemoryReader(writer)
            if reader.find():
                assert same(load(reader), state(1))
                assert reader.loaded_from == "storage"
            save(writer, step)
            assert same(load(reader, f"{url}/checkpoint-{step}"), state(step))
