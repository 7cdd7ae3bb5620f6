"""Pickles of torch.distributed.checkpoint come back whole; one that names or changes anything else is refused."""

import io
import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import metadata as earlier
from torch.distributed.checkpoint import filesystem, metadata, planner

from fastckpt.dcp.known_classes import unpickled
from fastckpt.dcp.stored_metadata import check_paths, read_index, read_metadata
from fastckpt.errors import BadCheckpoint
from tests.e2e.dcp.states import Evil

SIZE, CHUNK = torch.Size([2, 3]), metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
WHERE = "ctorch.distributed.checkpoint.metadata\n"
ENUM = f"{WHERE}_MEM_FORMAT_ENCODING\n"
CLASSES = (
    metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties,
    filesystem._StorageInfo, planner.SavePlan, earlier.TensorProperties, torch.Size,
)  # fmt: skip
MEMBERS = (*metadata._MEM_FORMAT_ENCODING, *earlier.MEM_FORMAT_ENCODING, *planner.WriteItemType)
SHARED = (*CLASSES, *MEMBERS, torch.serialization._get_layout)


def whole(**fields: Any) -> metadata.Metadata:
    properties = metadata.TensorProperties(torch.bfloat16, torch.sparse_coo, True, torch.channels_last)
    entries = {"w": metadata.TensorStorageMetadata(properties, SIZE, [CHUNK]), "x": metadata.BytesStorageMetadata()}
    places = {
        metadata.MetadataIndex("w", CHUNK.offsets, 0): filesystem._StorageInfo("__0_0.distcp", 0, 5, ["stream.zstd/1"]),
        metadata.MetadataIndex("x"): filesystem._StorageInfo("__0_0.distcp", 5, 7),
    }
    meta = metadata.StorageMeta(PurePosixPath("/a/b"), "save", "load", ["m"])
    paths = {"w": ("model", "w"), "x": ("list", 1)}
    return metadata.Metadata(**({"state_dict_metadata": entries, "planner_data": paths, "storage_data": places,
                                 "storage_meta": meta, "version": "1.0.0"} | fields))  # fmt: skip


def load(data: bytes) -> Any:
    return unpickled(io.BytesIO(data), "the file")


def text(opcodes: str) -> bytes:
    """A pickle of protocol 0, with strings as S'...'."""
    return opcodes.encode() + b"."


@pytest.mark.parametrize("protocol", [2, 5])
def test_what_torch_pickles_comes_back(protocol: int):
    kind = planner.WriteItemType.SHARD
    data = planner.TensorWriteData(CHUNK, metadata.TensorProperties(torch.int8), SIZE)
    plan = planner.SavePlan([planner.WriteItem(metadata.MetadataIndex("w", SIZE), kind, tensor_data=data)])
    old = earlier.TensorProperties(torch.float16, memory_format=torch.preserve_format)
    for each in (whole(), plan, old, [torch.float64, torch.strided, {"a": (1, 2.5, None, True)}, "text"]):
        assert load(pickle.dumps(each, protocol)) == each
    assert load(pickle.dumps(Path("/a/b"), protocol)) == PurePosixPath("/a/b")
    assert type(load(pickle.dumps(whole(), protocol))) is metadata.Metadata


def test_a_member_of_an_enum_comes_back_as_every_release_of_python_pickles_it():
    member = metadata._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    assert load(text(f"{ENUM}(I1\ntR")) is member
    assert load(text(f"cbuiltins\ngetattr\n({ENUM}S'TORCH_CHANNELS_LAST'\ntR")) is member


HOSTILE = {
    "a function": pickle.dumps([os.system]),
    "a call": text("cposix\nsystem\n(S'touch {mark}'\ntR"),
    "an instance": text("(S'touch {mark}'\nios\nsystem\n"),
    "a loader": text("ctorch\nload\n(S'{mark}'\ntR"),
    "a module of torch's": text("ctorch\nhub\n"),
    "a part of a class": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93.",
    "a getattr of another thing": text(f"cbuiltins\ngetattr\n({WHERE}Metadata\nS'__init__'\ntR"),
    "a getattr of an enum's class": text(f"cbuiltins\ngetattr\n({ENUM}S'__class__'\ntR"),
    "a constructor": text(f"{WHERE}MetadataIndex\n(S'a'\ntR"),
    "a persistent id": text("Pid\n"),
    "a registered extension": b"\x80\x02\x82\x01.",
    "slots of a class": text(f"{WHERE}Metadata\n(N(dS'version'\nS'9'\nstb"),
    "a method of a class": text(f"{WHERE}TensorProperties\n(N(dS'__setstate__'\n{WHERE}Metadata\nstb"),
    "slots of a member": text(f"{ENUM}(I0\ntR(N(dS'_name_'\nS'a'\nstb"),
    "a new attribute of a member, and damage": text(f"{ENUM}(I0\ntR(dS'own'\nI2\nsbR"),
    "a member of a value that takes forever to show": text(
        "(lp1\n0" + "".join(f"(g{n}\ng{n}\nlp{n + 1}\n0" for n in range(1, 60)) + f"{ENUM}(g60\ntR"
    ),
    "its beginning": pickle.dumps(whole())[:300],
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_pickle_that_names_or_changes_anything_else_is_refused(tmp_path: Path, kind: str):
    mark, before = tmp_path / "mark", [dict(vars(each)) for each in SHARED]
    with pytest.raises(pickle.UnpicklingError, match=r"^the file (has|would change|is damaged)"):
        load(HOSTILE[kind].replace(b"{mark}", str(mark).encode()))
    assert not mark.exists()
    assert before == [dict(vars(each)) for each in SHARED]
    assert load(pickle.dumps(whole())) == whole()


def entry(**fields: Any) -> dict[str, Any]:
    kept = whole().state_dict_metadata["w"]
    vars(kept).update(fields)
    return {"w": kept}


def place(**fields: Any) -> dict[Any, Any]:
    told = {"relative_path": "a", "offset": 0, "length": 1} | fields
    return {metadata.MetadataIndex("w"): filesystem._StorageInfo(**told)}


LIES = {
    "no entries": whole(state_dict_metadata=None),
    "an entry of another kind": whole(state_dict_metadata={"w": 5}),
    "a chunk of another kind": whole(state_dict_metadata=entry(chunks=[5])),
    "a dtype of another kind": whole(state_dict_metadata=entry(properties=metadata.TensorProperties("float32"))),
    "a place that is none": whole(storage_data={metadata.MetadataIndex("w"): 5}),
    "a negative offset": whole(storage_data=place(offset=-1)),
    "another file": whole(storage_data=place(relative_path="/etc/passwd")),
    "a file above": whole(storage_data=place(relative_path="a/../../b")),
    "paths of another kind": whole(planner_data=[1]),
    "a path that is missing": whole(planner_data={"w": ("w",)}),
    "a list that fits nowhere": whole(planner_data={"w": ("w",), "x": ("x", 10**12)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIES)
def test_metadata_of_another_shape_are_refused_by_the_name_of_the_file(tmp_path: Path, kind: str):
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(LIES[kind]))
    with pytest.raises(BadCheckpoint, match=f"^{file} is not as torch.distributed.checkpoint writes it: ") as error:
        check_paths(read_metadata(file, weights_only=True), file)
    assert len(str(error.value)) < 500


def test_metadata_that_are_as_torch_writes_them_are_read(tmp_path: Path):
    file = tmp_path / ".metadata"
    for good in (whole(), whole(planner_data=None, storage_meta=None), whole(planner_data={})):
        file.write_bytes(pickle.dumps(good))
        check_paths(found := read_metadata(file, weights_only=True), file)
        assert found == good == read_metadata(file, weights_only=False)


def test_an_index_runs_code_only_if_it_is_trusted(tmp_path: Path):
    file, mark = tmp_path / "index", tmp_path / "mark"
    file.write_bytes(pickle.dumps({metadata.MetadataIndex("w"): Evil(mark)}))
    with pytest.raises(pickle.UnpicklingError, match=f"^{file} has posix.system, .*pass weights_only=False"):
        read_index(file, weights_only=True)
    assert not mark.exists()
    read_index(file, weights_only=False)
    assert mark.exists()
    file.write_bytes(pickle.dumps(whole().storage_data))
    assert read_index(file, weights_only=True) == whole().storage_data
    file.write_bytes(pickle.dumps(place(relative_path="../a")))
    with pytest.raises(BadCheckpoint, match=r"outside of its directory, in '\.\./a'"):
        read_index(file, weights_only=True)
