"""With weights_only=True, no file of a sharded checkpoint runs code, and what would not load is not saved."""

import errno
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from fastckpt._core.format import manifest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.dcp import SharedMemoryReader, SharedMemoryWriter, StorageType
from fastckpt.dcp.known_classes import unpickled
from fastckpt.dcp.python_values import check_shards
from fastckpt.errors import BadCheckpoint, NoLoadableCheckpoint, NotLoadable
from fastckpt.fsdp import FsdpShardCheckpointer
from tests.e2e.dcp.states import Evil

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class OwnPlanner(DefaultLoadPlanner):
    """Loads values as torch's does, by a method of its own."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=False)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def saved(folder: Path) -> Path:
    with FsdpShardCheckpointer(folder) as checkpointer:
        checkpointer.save_checkpoint(1, model(), storage_type=StorageType.DISK)
    return folder / "checkpoint-1"


def hostile(folder: Path, mark: Path) -> Path:
    """The same with metadata that run code, by their manifest whole."""
    place = saved(folder)
    file, listed = place / ".metadata", place / manifest.NAME
    file.write_bytes(pickle.dumps(Evil(mark)))
    body = json.loads(listed.read_text())
    del body["digest"]
    entry = next(each for each in body["files"] if each["name"] == file.name)
    entry |= {"size": file.stat().st_size, "digest": xxhash.xxh3_128_hexdigest(file.read_bytes())}
    listed.write_text(json.dumps(body | {"digest": manifest._digest(body)}))
    return place


def of_stock(place: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return place


def load(folder: Path, path: Any = "", **options: Any) -> dict[str, Any]:
    with FsdpShardCheckpointer(folder, **options) as checkpointer:
        return checkpointer.load_checkpoint(model(), (), path)


def stock_metadata(folder: Path, mark: Path) -> Path:
    place = hostile(folder / "made", mark)
    (place / "manifest.json").unlink()
    return place


def stock_value(folder: Path, mark: Path) -> Path:
    return of_stock(folder / "stock", {"model": model().state_dict(), "note": Evil(mark)})


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("make", [stock_metadata, stock_value])
def test_a_directory_of_stock_torch_runs_code_only_if_it_is_trusted(
    tmp_path: Path, make: Callable[[Path, Path], Path], weights_only: bool
):
    mark = tmp_path / "mark"
    place = make(tmp_path, mark)
    file = ".metadata" if make is stock_metadata else "'note' in .*__0_0.distcp"
    refused = f"{file} has posix.system, .*pass weights_only=False to the checkpointer if you trust"
    if weights_only:
        with pytest.raises((BadCheckpoint, CheckpointException), match=refused):
            load(tmp_path / "run", place)
    elif make is stock_value:
        assert load(tmp_path / "run", place, weights_only=False) == {"note": 0}
    else:
        with pytest.raises(BadCheckpoint, match="AttributeError"):
            load(tmp_path / "run", place, weights_only=False)
    assert mark.exists() != weights_only


def test_metadata_that_run_code_are_passed_over_as_a_file_that_does_not_load(tmp_path: Path):
    place = hostile(tmp_path / "run", mark := tmp_path / "mark")
    CheckpointDirectory(tmp_path / "run").checkpoints()[0].verify()
    with pytest.raises(NoLoadableCheckpoint, match=f"UnpicklingError: {place}/.metadata has posix.system"):
        load(tmp_path / "run")
    with pytest.raises(BadCheckpoint, match=f"UnpicklingError: {place}/.metadata has posix.system"):
        load(tmp_path / "own", place)
    assert not mark.exists() and place.exists()


@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner(flatten_state_dict=False), OwnPlanner()])
def test_values_run_no_code_whichever_planner_loads_them(tmp_path: Path, planner: Any):
    bad = of_stock(tmp_path / "bad", {"w": torch.arange(3), "note": Evil(mark := tmp_path / "mark")})
    good = of_stock(tmp_path / "good", {"w": torch.arange(3), "note": (1, "a")})
    with SharedMemoryWriter(tmp_path / "run") as writer:
        reader, state = SharedMemoryReader(writer), {"w": torch.zeros(3, dtype=torch.int64), "note": None}
        dcp.load(state, storage_reader=reader, checkpoint_id=good, planner=planner)
        if planner is None or isinstance(planner, OwnPlanner):
            assert state["note"] == (1, "a")
        else:
            assert planner.state_dict["note"] == (1, "a")
        assert torch.equal(state["w"], torch.arange(3))
        with pytest.raises(CheckpointException, match=f"'note' in {bad}/__0_0.distcp has posix.system"):
            dcp.load(state, storage_reader=reader, checkpoint_id=bad, planner=planner)
    assert not mark.exists()


class Unknown:
    """A value of a class of the user's."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Unknown

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_value_of_an_unknown_class_is_refused_by_name_when_it_is_saved_or_comes_back(
    tmp_path: Path, weights_only: bool
):
    refused = r"note is a .*Unknown, which torch.load\(weights_only=True\) refuses.* \(FC-006"
    extra = {"plain": [1, {"a": (2.5, None, True)}, torch.float32, b"b"], "at": 5}
    odd = extra | {"note": Unknown()}
    with FsdpShardCheckpointer(tmp_path / "run", weights_only=weights_only) as checkpointer:
        if weights_only:
            with pytest.raises(NotLoadable, match=refused):
                checkpointer.save_checkpoint(1, model(), extra_sd=odd)
        for step, each in enumerate([extra] if weights_only else [extra, odd], start=2):
            assert checkpointer.save_checkpoint(step, model(), extra_sd=each)
            assert checkpointer.load_checkpoint(model()) == each
    with SharedMemoryWriter(tmp_path / "other", weights_only=weights_only) as writer:
        if weights_only:
            with pytest.raises(CheckpointException, match=refused):
                dcp.save({"note": Unknown()}, storage_writer=writer, checkpoint_id="1")
        note = extra if weights_only else Unknown()
        dcp.save({"note": note}, storage_writer=writer, checkpoint_id="2")
        if not weights_only:
            dcp.load(state := {"note": None}, storage_reader=SharedMemoryReader(writer))
            assert state == {"note": note}


def test_shards_that_a_framework_loads_by_itself_are_looked_at_first(tmp_path: Path):
    """As accelerate does, by a reader that unpickles anything."""
    of_stock(tmp_path / "a/model", {"w": torch.arange(3), "note": (1, "a")})
    check_shards(tmp_path / "a")
    place = of_stock(tmp_path / "a/optimizer", {"w": torch.arange(3), "note": Evil(mark := tmp_path / "mark")})
    with pytest.raises(pickle.UnpicklingError, match=f"'note' in {place}/__0_0.distcp has posix.system"):
        check_shards(tmp_path / "a")
    (place / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(pickle.UnpicklingError, match=f"{place}/.metadata has posix.system"):
        check_shards(tmp_path / "a")
    assert not mark.exists()


def test_metadata_that_cannot_be_read_now_are_not_called_damaged():
    class Silent(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(errno.ENOMEM, "no memory")

        readline = readinto = read

    with pytest.raises(OSError, match="no memory"):
        unpickled(Silent(), "it")
