"""Commands on a directory that is a URL: of a store in this process."""

from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage import reading
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote.remote_store import RemoteStore
from tests.cli.conftest import state


@pytest.fixture
def far(tmp_path) -> str:
    return f"memory://{tmp_path.name}/run"


@pytest.fixture
def stored(far, tmp_path) -> str:
    """It has steps 10, 20 and 30."""
    for step in (10, 20, 30):
        publish(far, tmp_path, step, state(step))
    return far


def publish(url: str, folder: Path, step: int, content: Any) -> None:
    (images := folder / f"images-{step}").mkdir()
    for name, value in {"model.pt": content, "rank_0.pt": {"step": step}}.items():
        torch.save(value, images / name)
    with closing(RemoteStore(url)) as store:
        store.publish(PublishRequest(SaveId(1, step), {path.name: path for path in sorted(images.iterdir())}))


def test_commands_read_a_directory_at_a_url_and_prune_deletes_there(fastckpt, stored, tmp_path, monkeypatch):
    fs = fsspec.filesystem("memory")
    before = fs.find(stored)
    items = fastckpt("ls", stored, "--json").document["checkpoints"]
    assert [(item["step"], item["state"]) for item in items] == [(30, "whole"), (20, "whole"), (10, "whole")]
    assert all(item["path"].startswith(f"{stored}/checkpoint-") for item in items)
    model = fastckpt("show", f"{stored}@20", "--json").document["files"][0]
    assert model["path"].endswith("/model.pt") and [entry["name"] for entry in model["entries"]][2] == "model.w"
    assert fastckpt("which", stored, "--verify", "--json").document["choice"]["step"] == 30
    said = fastckpt("verify", stored, "--all", "--json")
    assert said.code == 0 and said.document["good"] == 7
    said = fastckpt("diff", f"{stored}@10", f"{stored}@30", "--file", "model.pt", "--json")
    assert said.code == 1 and said.document["files"][0]["tensors"][0]["max_abs"] == 20
    assert fastckpt("export", f"{stored}@20", tmp_path / "m.safetensors", "--only", "model").code == 0
    assert torch.equal(load_file(tmp_path / "m.safetensors")["w"], torch.full((4, 3), 20.0))
    assert fs.find(stored) == before
    assert fastckpt("prune", stored, "--keep-last", "1", "--yes").code == 0
    assert {key.split("/")[3].split("-")[1] for key in fs.find(stored) if "/checkpoint-" in key} == {"30"}

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("403")

    for name in ("_open", "cat_file", "ls", "find"):
        monkeypatch.setattr(type(fs), name, refuse)
    for command, url in (*((each, stored) for each in ("ls", "show", "verify", "which")), ("ls", "strange://b/run")):
        said = fastckpt(command, url, "--json")
        assert said.code == 2 and not said.out and url in said.err


def test_show_and_export_of_a_large_state_at_a_url_ask_for_what_they_need(fastckpt, far, tmp_path, monkeypatch):
    publish(far, tmp_path, 1, {"w": torch.zeros(1_000_000), "step": 1})
    asked: list[int] = []
    read_range = reading._Remote.readinto

    def counted(self: Any, buffer: Any) -> int:
        before = self._start, len(self._ahead)
        count = read_range(self, buffer)
        asked.append(len(self._ahead) if (self._start, len(self._ahead)) != before else 0)
        return count

    monkeypatch.setattr(reading._Remote, "readinto", counted)
    said = fastckpt("show", far, "--file", "model.pt", "--json")
    assert said.document["files"][0]["bytes"] == 4_000_000 and 0 < sum(asked) < 2_000_000
    assert fastckpt("export", f"{far}@1", tmp_path / "m.pt").code == 0
    assert fastckpt("diff", f"{far}@1", tmp_path / "m.pt").code == 0


def test_verify_finds_damage_at_a_url(fastckpt, stored):
    fs = fsspec.filesystem("memory")
    [model] = [key for key in fs.find(stored) if "/checkpoint-30/" in key and key.endswith("model.pt")]
    data = bytearray(fs.cat_file(model))
    data[len(data) // 2] ^= 1
    fs.pipe_file(model, bytes(data))
    assert fastckpt("ls", stored, "--json").document["checkpoints"][0]["whole"]
    said = fastckpt("verify", stored, "--json")
    [bad] = [finding for finding in said.document["findings"] if finding["verdict"] == "bad"]
    assert said.code == 1 and bad["path"].endswith(model) and bad["found"] != bad["expected"]
    assert fastckpt("which", stored, "--verify", "--json").document["choice"]["step"] == 20
    fs.rm_file(model)
    newest = fastckpt("ls", stored, "--json").document["checkpoints"][0]
    assert (newest["step"], newest["history"], newest["state"]) == (30, 1, "damaged")
    assert fastckpt("verify", stored).code == 1


def test_a_lost_directory_is_found_in_its_remote_store(fastckpt, stored, three, tmp_path):
    lost = tmp_path / "lost"
    both = [lost, "--remote", stored]
    for command in ("ls", "which", "verify", "prune", "report"):
        said = fastckpt(command, lost, *(["--keep-last", "1"] if command == "prune" else []))
        assert said.code == 2 and not said.out and "no directory" in said.err
    assert [item["tier"] for item in fastckpt("ls", *both, "--json").document["checkpoints"]] == ["remote"] * 3
    choice = fastckpt("which", *both, "--verify", "--json").document["choice"]
    assert (choice["step"], choice["tier"]) == (30, "remote")
    assert fastckpt("verify", f"{lost}@20:remote", "--remote", stored, "--json").document["good"] == 2
    for asked in (both, [stored]):
        held = fastckpt("report", *asked, "--json").document["remote"]
        assert (held["location"], held["checkpoints"], held["newest"]["step"]) == (stored, 3, 30)
    shown = fastckpt("report", *both).out
    told = f"{stored} holds 3 whole checkpoints; the newest is step 30 of history 1"
    assert told in shown and "--fast-events" in shown
    assert fastckpt("prune", *both, "--keep-last", "2", "--json").document["freed"] > 0
    assert len(fastckpt("ls", stored, "--json").document["checkpoints"]) == 3, "not without --yes"
    assert fastckpt("prune", *both, "--keep-last", "2", "--yes").code == 0
    assert [item["step"] for item in fastckpt("ls", *both, "--json").document["checkpoints"]] == [30, 20]
    assert not lost.exists(), "who looks makes nothing"
    both[0] = three  # each tier by its own checkpoints
    assert fastckpt("prune", *both, "--keep-last", "1", "--yes").code == 0
    found = fastckpt("ls", *both, "--json").document["checkpoints"]
    assert [(item["step"], item["tier"]) for item in found] == [(30, "storage"), (30, "remote")]
