"""`fastckpt export`: complete files for other tools, or none."""

import collections
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastckpt import DdpCheckpointer, StorageType
from tests.cli import harm
from tests.cli.conftest import publish
from tests.support.largest_file import largest_file


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def model(tmp_path) -> Path:
    return tmp_path / "model.pt"


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_tied_tensors_views_and_lists_are_exported_and_tensors_as_safetensors_does(fastckpt, model, out, monkeypatch):
    weights = torch.arange(12.0).view(3, 4)
    state = {"head": weights, "embedding": weights, "part": weights[1:], "t": weights.t()}
    state |= {"conj": torch.tensor([1j]).conj()}
    layers = [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]
    torch.save(collections.OrderedDict(**state, layers=layers, groups=[], note=None), model)
    assert fastckpt("export", model, out / "m.safetensors").code == 0
    tensors, said = load_file(out / "m.safetensors"), metadata(out / "m.safetensors")
    assert sorted(tensors) == ["conj", "head", "layers.0.w", "layers.1.w", "part", "t"] and said["embedding"] == "head"
    assert all(torch.equal(tensors[name], state[name]) for name in ("conj", "head", "part", "t"))
    assert json.loads(said["fastckpt.values"]) == {"groups": [], "note": None}
    assert fastckpt("export", model, out / "m.pt").code == 0
    loaded = torch.load(out / "m.pt")
    assert loaded["head"].data_ptr() == loaded["embedding"].data_ptr()

    types = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
    state = {str(dtype): torch.arange(7).to(dtype) for dtype in types}
    state |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5), "large": torch.arange(5_000_000.0)}
    torch.save(state, model)
    save_file(state, out / "theirs.safetensors", metadata={"format": "pt"})
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "safetensors", None)
        assert fastckpt("export", model, out / "ours.safetensors").code == 0
    assert (out / "ours.safetensors").read_bytes() == (out / "theirs.safetensors").read_bytes()


def test_what_safetensors_cannot_hold_is_refused_by_name(fastckpt, model, out):
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
    odd = {"sparse": torch.eye(2).to_sparse(), "q": quantized, "meta": torch.empty(2, device="meta")}
    odd |= {"d": torch.float16}
    torch.save({"good": {"w": torch.ones(2)}, "odd": odd}, model)
    said = fastckpt("export", model, out / "m.safetensors")
    assert said.code == 2 and listed(out) == []
    for name in ("odd.sparse", "odd.q", "odd.meta", "odd.d (dtype)", "--only", "--format torch"):
        assert name in said.err
    assert fastckpt("export", model, out / "m.safetensors", "--only", "good").code == 0
    said = fastckpt("export", model, out / "n.safetensors", "--only", "good.none")
    assert said.code == 2 and "'none'" in said.err
    for state, name in (
        ({"good": torch.ones(2), "wide": torch.ones(2, dtype=torch.complex128)}, "'wide'"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "a.b"),  # which coincide
    ):
        torch.save(state, model)
        said = fastckpt("export", model, out / "n.safetensors")
        assert said.code == 2 and name in said.err and listed(out) == ["m.safetensors"]


def test_export_overwrites_no_file(fastckpt, three, out, monkeypatch):
    (out / "state.pt").write_text("mine")
    said = fastckpt("export", three, out / "state.pt")
    assert said.code == 2 and "--force" in said.err and (out / "state.pt").read_text() == "mine"
    (out / "link.pt").symlink_to("nowhere")
    for name in ("link.pt", "none/state.pt"):
        said = fastckpt("export", three, out / name)
        assert said.code == 2 and str((out / name).parent) in said.err
    assert fastckpt("export", three, out / "state.pt", "--force").code == 0
    assert torch.load(out / "state.pt", weights_only=True)["step"] == 30
    save = torch.save

    def save_slowly(*arguments: Any) -> None:
        save(*arguments)
        (out / "new.pt").write_text("theirs")

    monkeypatch.setattr(torch, "save", save_slowly)
    assert fastckpt("export", three, out / "new.pt").code == 2 and (out / "new.pt").read_text() == "theirs"
    assert listed(out) == ["link.pt", "new.pt", "state.pt"]


def test_an_export_to_a_full_disk_or_of_a_damaged_checkpoint_leaves_no_file(fastckpt, directory, out):
    publish(directory, 1, state={"w": torch.zeros(100_000)})
    names = ("state.pt", "state.safetensors")
    for name in names:
        with largest_file(100_000):
            said = fastckpt("export", directory, out / name)
        assert said.code == 2 and str(out) in said.err and listed(out) == []
    harm.flip(directory / "checkpoint-1/model.pt")
    for name in names:
        said = fastckpt("export", f"{directory}@1", out / name)
        assert said.code == 2 and "xxh3-128" in said.err and listed(out) == []


def test_export_reads_the_memory_of_a_running_job(fastckpt, directory, out, monkeypatch):
    save = torch.save
    with DdpCheckpointer(directory) as checkpointer:

        def save_while_training(*arguments: Any) -> None:
            save(*arguments)
            monkeypatch.setattr(torch, "save", save)
            for step in (2, 3, 4):
                checkpointer.save_checkpoint(step, {"w": torch.ones(10)}, storage_type=StorageType.MEMORY)

        checkpointer.save_checkpoint(1, {"w": torch.ones(10)}, storage_type=StorageType.MEMORY)
        assert fastckpt("export", directory, out / "one.pt").code == 0
        assert torch.equal(torch.load(out / "one.pt")["w"], torch.ones(10))
        monkeypatch.setattr(torch, "save", save_while_training)
        said = fastckpt("export", f"{directory}@1", out / "two.pt")
        assert said.code == 2 and "took its slot" in said.err and listed(out) == ["one.pt"]
