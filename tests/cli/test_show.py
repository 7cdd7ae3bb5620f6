"""`fastckpt show`: the contents of a file, without reading its tensors or running its code."""

import argparse
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fastckpt._core.format.skeleton import sketch
from fastckpt._core.inspect import tree as tree_module
from fastckpt._core.inspect.tree import TreeEntry, read_tree, stored_bytes
from tests.cli import harm
from tests.cli.conftest import Said


def saved(state: Any, **options: Any) -> list[TreeEntry]:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return read_tree(buffer, "buffer")


@pytest.fixture
def model(tmp_path) -> Path:
    return tmp_path / "model.pt"


def assert_refused(said: Said, *texts: str) -> None:
    assert said.code == 2 and not said.out and all(text in said.err for text in texts), said


def test_show_names_tensor_types_as_torch_loads_them_and_counts_shared_bytes_once():
    base = torch.arange(6.0).view(2, 3)
    state = {
        "plain": base, "view": base.t(), "parameter": torch.nn.Parameter(base), "bf16": base.bfloat16(),
        "f8": base.to(torch.float8_e4m3fn), "u16": base.to(torch.uint16), "complex": base.to(torch.complex64),
        "bool": base > 1, "scalar": torch.tensor(3), "empty": torch.empty(0, 4), "half": base.half(),
        "conj": base.to(torch.complex64).conj(), "double": base.double(), "i8": base.to(torch.int8),
        "meta": torch.empty(3, 4, device="meta"),
    }  # fmt: skip
    found = {entry.name: entry.value for entry in saved(state)}
    for name, tensor in state.items():
        assert found[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert found[name].shape == tuple(tensor.shape) and found[name].stride == tensor.stride()
        assert found[name].size == tensor.numel() * tensor.element_size()
    assert found["conj"].views == {"conj"}
    assert found["plain"].storage == found["view"].storage == found["parameter"].storage != found["double"].storage
    weights = torch.zeros(100)
    assert stored_bytes(saved({"a": weights, "b": weights, "c": weights[:10]})) == 400


def test_show_describes_objects_of_other_classes_up_to_a_limit_and_runs_no_code(fastckpt, model, tmp_path, monkeypatch):
    held = argparse.Namespace(lr=0.1, weights=torch.zeros(2))
    endless: list[Any] = [torch.zeros(1)]
    endless.append(endless)
    state = {"args": argparse.Namespace(lr=0.1), "array": numpy.arange(3), "held": held, "endless": endless}
    torch.save(state, model)
    entries = {entry["name"]: entry for entry in fastckpt("show", model, "--json").document["files"][0]["entries"]}
    assert entries["args"]["value"] == "argparse.Namespace(state={'lr': 0.1})"
    assert entries["array"]["kind"] == "value" and entries["array"]["type"].startswith("numpy.")
    assert entries["held.(state).weights"]["shape"] == [2]
    assert "holds itself" in fastckpt("show", model).out
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Attack(), "w": torch.ones(2)}, "bad.pt")
    said = fastckpt("show", "bad.pt")
    assert said.code == 0 and "posix.system('touch attacked')" in said.out
    assert fastckpt("diff", "bad.pt", "bad.pt").code == 0
    assert_refused(fastckpt("export", "bad.pt", "out.pt"), "weights_only")
    assert not Path("out.pt").exists() and not Path("attacked").exists()
    monkeypatch.setattr(tree_module, "MOST", 5000)
    nested: Any = 1
    for _ in range(30):
        nested = [nested, nested]
    model.write_bytes(archive(pickle.dumps(nested)))
    assert_refused(fastckpt("show", model), "more than 5000 entries")


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def archive(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
    return buffer.getvalue()


def big_endian_numbers(path: Path) -> None:
    path.write_bytes(struct.pack(">Q", 12345) * 100)


@pytest.mark.parametrize("damage", [harm.truncate, harm.directory_instead, big_endian_numbers])
def test_show_refuses_damaged_files_and_shows_the_checkpoint_before(fastckpt, three, damage):
    model = three / "checkpoint-30/model.pt"
    damage(model)
    assert_refused(fastckpt("show", model), "model.pt")
    assert_refused(fastckpt("show", f"{three}@30"), "not whole: damaged")
    assert fastckpt("show", three).code == 0


def test_show_of_a_ten_gigabyte_file_does_not_read_it(fastckpt, model):
    """A file of real offsets beyond 4 GiB whose tensors are holes."""
    layers = {f"layer-{i}": torch.empty(10**9, device="cpu").expand(10**9) for i in range(3)}
    skeleton, *_ = sketch(layers | {"step": 7})
    with model.open("wb") as file:
        for offset, data in skeleton.segments:
            file.seek(offset)
            file.write(data)
        file.truncate(skeleton.length)
    assert model.stat().st_size > 12 * 10**9
    before = read_bytes()
    document = fastckpt("show", model, "--json").document
    assert read_bytes() - before < 10**6
    assert document["files"][0]["bytes"] == 12 * 10**9
    assert document["files"][0]["entries"][-1]["value"] == 7


def read_bytes() -> int:
    """Bytes that this process has read with system calls, from the page cache or not."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
