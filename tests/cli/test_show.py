"""`fastckpt show`: the contents of a file, without reading its tensors or running its code."""

import argparse
import collections
import io
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.format.skeleton import sketch
from fastckpt._core.inspect import tree as tree_module
from fastckpt._core.inspect.pickled import Tensor
from fastckpt._core.inspect.tree import Group, TreeEntry, read_tree, stored_bytes
from tests.cli import harm
from tests.cli.conftest import Fastckpt, publish


def saved(state: Any, **options: Any) -> list[TreeEntry]:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return read_tree(buffer, "buffer")


def test_show_lists_every_name_with_type_shape_and_bytes(fastckpt: Fastckpt, three: Path):
    document = fastckpt("show", f"{three}@20", "--json").document
    assert document["checkpoint"]["step"] == 20 and document["checkpoint"]["tier"] == "storage"
    model, rank = document["files"]
    path = three / "checkpoint-20/model.pt"
    common = {"shape": None, "bytes": None, "storage": None, "value": None}
    assert model == {
        "name": "model.pt",
        "path": str(path),
        "size": path.stat().st_size,
        "tensors": 2,
        "bytes": 60,
        "entries": [
            {**common, "name": "", "kind": "group", "type": "dict"},
            {**common, "name": "model", "kind": "group", "type": "dict"},
            {"name": "model.w", "kind": "tensor", "type": "float32", "shape": [4, 3], "bytes": 48, "storage": "0",
             "value": None},
            {"name": "model.b", "kind": "tensor", "type": "float32", "shape": [3], "bytes": 12, "storage": "1",
             "value": None},
            {**common, "name": "step", "kind": "value", "type": "int", "value": 20},
            {**common, "name": "lr", "kind": "value", "type": "float", "value": 0.5},
        ],
    }  # fmt: skip
    names = [entry["name"] for entry in rank["entries"]]
    assert [name for name in names if not name.startswith(("rng.python", "rng.numpy"))] == [
        "",
        "rng",
        "rng.cpu",
        "state",
        "state.epoch",
    ]
    assert {"rng.python.1", "rng.numpy.state.key"} <= set(names)


def test_show_prints_a_tree_without_json(fastckpt: Fastckpt, three: Path):
    lines = fastckpt("show", three, "--file", "model.pt").out.splitlines()
    assert lines[0].endswith("2 tensors of 60 B")
    assert [line.split() for line in lines[1:7]] == [
        ["NAME", "TYPE", "SHAPE", "BYTES", "VALUE"],
        ["model", "dict", "of", "2"],
        ["w", "float32", "4x3", "48", "B"],
        ["b", "float32", "3", "12", "B"],
        ["step", "int", "30"],
        ["lr", "float", "0.5"],
    ]
    shallow = fastckpt("show", three, "--file", "model.pt", "--depth", "1").out
    assert "step" in shallow and "4x3" not in shallow


def test_show_reads_a_checkpoint_in_memory(fastckpt: Fastckpt, directory: Path):
    with DdpCheckpointer(directory) as checkpointer:
        for step in (1, 2):  # the second writes its numbers in place
            checkpointer.save_checkpoint(
                step, {"w": torch.full((5,), step), "step": step}, storage_type=StorageType.MEMORY
            )
        document = fastckpt("show", directory, "--file", "model.pt", "--json").document
        assert document["checkpoint"]["tier"] == "memory" and document["checkpoint"]["step"] == 2
        values = {entry["name"]: entry["value"] for entry in document["files"][0]["entries"]}
        assert values["step"] == 2


def test_show_names_tensor_types_as_torch_loads_them():
    base = torch.arange(6.0).view(2, 3)
    state = {
        "plain": base, "view": base.t(), "parameter": torch.nn.Parameter(base), "bf16": base.bfloat16(),
        "f8": base.to(torch.float8_e4m3fn), "u16": base.to(torch.uint16), "complex": base.to(torch.complex64),
        "bool": base > 1, "scalar": torch.tensor(3), "empty": torch.empty(0, 4), "half": base.half(),
        "conj": base.to(torch.complex64).conj(), "double": base.double(), "i8": base.to(torch.int8),
    }  # fmt: skip
    found = {entry.name: entry.value for entry in saved(state)}
    for name, tensor in state.items():
        assert found[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert found[name].shape == tuple(tensor.shape) and found[name].stride == tensor.stride()
        assert found[name].size == tensor.numel() * tensor.element_size()
    assert found["conj"].views == {"conj"}
    assert found["plain"].storage == found["view"].storage == found["parameter"].storage
    assert found["plain"].storage != found["double"].storage


def test_show_counts_bytes_of_shared_storages_once():
    weights = torch.zeros(100)
    assert stored_bytes(saved({"a": weights, "b": weights, "c": weights[:10]})) == 400


def test_show_describes_sparse_quantized_and_meta_tensors():
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
    state = {"sparse": torch.eye(3).to_sparse(), "q": quantized, "meta": torch.empty(3, device="meta")}
    entries = {entry.name: entry for entry in saved(state)}
    assert entries["q"].type == "qint8" and entries["q"].value.quantizer == "torch.per_tensor_affine, 0.5, 1"
    assert entries["meta"].value == Tensor("float32", (3,), (1,), 0, None)
    assert entries["sparse"].type == "torch._utils._rebuild_sparse_tensor"
    held = [entry.value.dtype for name, entry in entries.items() if name.startswith("sparse.")
            and isinstance(entry.value, Tensor)]  # fmt: skip
    assert held == ["int64", "float32"]


@pytest.mark.parametrize("protocol", [2, 5])
def test_show_describes_values_and_containers(protocol: int):
    state = {
        "od": collections.OrderedDict(a=1), 3: (1, [None, True]), "text": "x", "bytes": b"ab", "dtype": torch.float16,
        "size": torch.Size([2, 3]), "empty": [], "set": {1, 2}, "complex": 2j, "nan": float("nan"),
    }  # fmt: skip
    entries = {entry.name: entry for entry in saved(state, pickle_protocol=protocol)}
    assert entries["od"].value == Group("OrderedDict", 1) and entries["3.1.1"].value is True
    assert entries["3"].value == Group("tuple", 2) and entries["empty"].value == Group("list", 0)
    assert entries["bytes"].value == b"ab" and entries["set"].value == {1, 2} and entries["complex"].value == 2j
    assert repr(entries["dtype"].value) == "torch.float16" and entries["size.1"].value == 3


def test_show_describes_objects_of_other_classes(fastckpt: Fastckpt, tmp_path: Path):
    path = tmp_path / "odd.pt"
    held = argparse.Namespace(lr=0.1, weights=torch.zeros(2))
    torch.save({"args": argparse.Namespace(lr=0.1), "array": numpy.arange(3), "held": held}, path)
    entries = {entry["name"]: entry for entry in fastckpt("show", path, "--json").document["files"][0]["entries"]}
    assert entries["args"]["value"] == "argparse.Namespace(state={'lr': 0.1})"
    assert entries["array"]["kind"] == "value" and entries["array"]["type"].startswith("numpy.")
    assert entries["held.(state).weights"]["shape"] == [2]


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def test_show_runs_no_code_of_a_pickle(fastckpt: Fastckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Attack(), "w": torch.ones(2)}, "bad.pt")
    said = fastckpt("show", "bad.pt")
    assert said.code == 0 and "posix.system('touch attacked')" in said.out
    assert not Path("attacked").exists()
    assert fastckpt("diff", "bad.pt", "bad.pt").code == 0
    said = fastckpt("export", "bad.pt", "out.pt")
    assert said.code == 2 and "weights_only" in said.err and not Path("out.pt").exists()
    assert not Path("attacked").exists()


def archive(pickled: bytes) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
    return buffer


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"garbage",
        pickle.dumps({"a": 1})[:-4],
        b"\x80\x02ctorch\nFloatStorage\n" + b"Q.",  # a persistent id that is none
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ\xff\xff\xff\xfftQ.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03tR.",
        b"\x80\x02c__builtin__\nset\n(](]e\x85R.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"]" * 100_000 + b"a" * 99_999 + b".",  # nested deeper than anybody can follow
    ],
)
def test_show_refuses_damaged_pickles(fastckpt: Fastckpt, tmp_path: Path, pickled: bytes):
    path = tmp_path / "model.pt"
    path.write_bytes(archive(pickled).getvalue())
    said = fastckpt("show", path)
    assert said.code == 2 and str(path) in said.err and not said.out


def test_show_refuses_a_pickle_that_describes_too_much(fastckpt: Fastckpt, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tree_module, "MOST", 5000)
    nested: Any = 1
    for _ in range(30):
        nested = [nested, nested]
    path = tmp_path / "model.pt"
    path.write_bytes(archive(pickle.dumps(nested)).getvalue())
    said = fastckpt("show", path)
    assert said.code == 2 and "more than 5000 entries" in said.err


def test_show_describes_a_container_that_holds_itself(fastckpt: Fastckpt, tmp_path: Path):
    endless: list[Any] = [torch.zeros(1)]
    endless.append(endless)
    torch.save(endless, tmp_path / "model.pt")
    said = fastckpt("show", tmp_path / "model.pt")
    assert said.code == 0 and "holds itself" in said.out


@pytest.mark.parametrize("damage", [harm.truncate, harm.empty, harm.directory_instead], ids=lambda d: d.__name__)
def test_show_refuses_damaged_files(fastckpt: Fastckpt, tmp_path: Path, damage):
    torch.save({"w": torch.zeros(1000)}, tmp_path / "model.pt")
    damage(tmp_path / "model.pt")
    said = fastckpt("show", tmp_path / "model.pt")
    assert said.code == 2 and "model.pt" in said.err and not said.out


def test_show_refuses_a_damaged_checkpoint_and_shows_the_one_before(fastckpt: Fastckpt, three: Path):
    harm.truncate(three / "checkpoint-30/model.pt")
    said = fastckpt("show", f"{three}@30")
    assert said.code == 2 and "not whole: damaged" in said.err
    assert fastckpt("show", three).code == 0  # the one before


def test_show_of_a_ten_gigabyte_file_does_not_read_it(fastckpt: Fastckpt, tmp_path: Path):
    """A file of real offsets beyond 4 GiB whose tensors are holes."""
    layers = {f"layer-{i}": torch.empty(10**9, device="cpu").expand(10**9) for i in range(3)}
    skeleton, *_ = sketch(layers | {"step": 7})
    path = tmp_path / "model.pt"
    with path.open("wb") as file:
        for offset, data in skeleton.segments:
            file.seek(offset)
            file.write(data)
        file.truncate(skeleton.length)
    assert path.stat().st_size > 12 * 10**9
    before = read_bytes()
    document = fastckpt("show", path, "--json").document
    assert read_bytes() - before < 10**6
    assert document["files"][0]["bytes"] == 12 * 10**9
    assert [entry["value"] for entry in document["files"][0]["entries"]][-1] == 7


def read_bytes() -> int:
    """Bytes that this process has read with system calls, from the page cache or not."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_big_endian_number_in_a_zip_is_no_archive(fastckpt: Fastckpt, tmp_path: Path):
    path = tmp_path / "model.pt"
    path.write_bytes(struct.pack(">Q", 12345) * 100)
    said = fastckpt("show", path)
    assert said.code == 2 and "no torch.save file" in said.err


def test_show_accepts_plain_directories_and_paths_with_at_signs(fastckpt: Fastckpt, tmp_path: Path):
    odd = tmp_path / "run@5"
    publish(odd, 5)
    publish(odd, 7)
    assert fastckpt("show", odd, "--json").document["checkpoint"]["step"] == 7
    assert fastckpt("show", f"{odd}@5", "--json").document["checkpoint"]["step"] == 5
    assert fastckpt("show", f"{odd}@5.1:storage", "--json").document["checkpoint"]["step"] == 5
    assert fastckpt("show", f"{odd}@latest", "--json").document["checkpoint"]["step"] == 7
    assert fastckpt("show", f"{odd}@5.2").code == 2
    assert "memory" in fastckpt("show", f"{odd}@5:disk").err
    plain = fastckpt("show", odd / "checkpoint-7", "--json").document
    assert plain["checkpoint"] is None and [file["name"] for file in plain["files"]] == ["model.pt", "rank_0.pt"]
