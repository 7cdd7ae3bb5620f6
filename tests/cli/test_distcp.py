"""`show`, `diff` and `export` read what torch.distributed.checkpoint writes, without running code that it names."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.cli.harm import flip
from tests.e2e.dcp.states import same
from tests.e2e.earlier.test_earlier import unpacked


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    odd = {"bf16": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0, 2), "turned": torch.randn(4, 6).t()}
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "odd": odd}
    return parts | {"step": 7, "name": "x", "list": [1, torch.arange(4), {"a": torch.tensor(2.5)}, []], "scalar": 0.5}


@pytest.fixture
def plain(tmp_path) -> Path:
    dcp.save(state(), checkpoint_id=tmp_path / "plain")
    return tmp_path / "plain"


def of_torch(folder: Path, tmp_path: Path) -> Any:
    dcp_to_torch_save(folder, tmp_path / "torch.pt")
    return torch.load(tmp_path / "torch.pt", weights_only=False)


def test_export_of_a_distcp_checkpoint_equals_what_torch_converts_it_to(plain, tmp_path, fastckpt):
    assert fastckpt("export", plain, tmp_path / "out.pt").code == 0
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), of_torch(plain, tmp_path))
    assert fastckpt("diff", plain, tmp_path / "out.pt").code == 0
    assert "model" in fastckpt("show", plain / ".metadata").out, "its .metadata names it, too"
    assert fastckpt("export", plain, tmp_path / "out.safetensors", "--only", "model").code == 0
    assert same(load_file(tmp_path / "out.safetensors"), dict(state()["model"]))


def test_shards_of_several_ranks_are_joined_on_export(tmp_path, fastckpt):
    """Reads a checkpoint directory that an earlier version wrote with two ranks."""
    directory = unpacked("fsdp", tmp_path / "checkpoints")
    names = [file["name"] for file in fastckpt("show", f"{directory}@2", "--json").document["files"]]
    assert sorted(names) == [".metadata", "rank_0.pt", "rank_1.pt"]
    assert fastckpt("export", f"{directory}@2", tmp_path / "out.pt").code == 0
    expected = of_torch(directory / "checkpoint-2", tmp_path)
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), expected)
    assert fastckpt("diff", f"{directory}@1", f"{directory}@2").code == 1
    assert fastckpt("diff", f"{directory}@2", directory / "checkpoint-2").code == 0
    flip(directory / "checkpoint-2/__1_0.distcp")  # the manifest has the digest of each file
    said = fastckpt("export", f"{directory}@2", tmp_path / "damaged.pt")
    assert said.code == 2 and "__1_0.distcp is damaged: its xxh3-128 is" in said.err


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def rewrite(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def rewritten(folder: Path) -> None:
        said = pickle.loads((folder / ".metadata").read_bytes())
        change(said)
        (folder / ".metadata").write_bytes(pickle.dumps(said))

    return rewritten


lose_the_way = rewrite(lambda said: said.planner_data.update(step=([1],)))
claim_much = rewrite(lambda said: setattr(said.state_dict_metadata["odd.bf16"], "size", torch.Size([1 << 50])))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lose_the_way, "the path to 'step' has more than names and numbers"),
        (
            lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Harm())),
            "is not as torch.distributed.checkpoint writes it",
        ),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 1000), "is cut off"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "names __0_0.distcp, which is not there"),
        (lambda folder: os.truncate(folder / ".metadata", 700), "is damaged"),
    ],
)
def test_a_damaged_distcp_checkpoint_is_refused_and_runs_no_code(plain, tmp_path, fastckpt, monkeypatch, damage, why):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plain, tmp_path / "bad")
    damage(tmp_path / "bad")
    for command in (("show", "bad"), ("diff", "bad", plain), ("export", "bad", "out.pt")):
        said = fastckpt(*command)
        assert said.code == 2 and why in said.err, said
    assert not (tmp_path / "harmed").exists() and not (tmp_path / "out.pt").exists()


def test_a_tensor_larger_than_memory_is_not_allocated(plain, tmp_path, fastckpt):
    claim_much(plain)
    said = fastckpt("export", plain, tmp_path / "out.pt")
    assert said.code == 2 and "which needs too much memory" in said.err, said
    assert not (tmp_path / "out.pt").exists()
