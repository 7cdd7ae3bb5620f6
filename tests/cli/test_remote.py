"""Every command on a directory that is a URL: a real S3 server, and requests that fail."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastckpt._core.format.ids import SaveId
from fastckpt._core.inspect.checkpoint_files import find
from fastckpt._core.inspect.export import ExportOrder, export_file
from fastckpt._core.storage import reading
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote.remote_store import RemoteStore
from tests.cli.conftest import state
from tests.cli.test_progress import Recorder
from tests.unit._core.storage.s3 import S3, Fault, s3, s3_server  # noqa: F401 (fixtures)

URL = "s3://bucket/run"


def publish(store: RemoteStore, folder: Path, step: int, content: Any = None) -> None:
    images = folder / f"images-{step}"
    images.mkdir()
    for name, value in {"model.pt": content or state(step), "rank_0.pt": {"step": step}}.items():
        torch.save(value, images / name)
    store.publish(PublishRequest(SaveId(1, step), {path.name: path for path in sorted(images.iterdir())}))


@pytest.fixture
def remote(s3, tmp_path) -> S3:  # noqa: F811
    """Steps 10, 20 and 30 in a bucket."""
    store = RemoteStore(URL)
    for step in (10, 20, 30):
        publish(store, tmp_path, step)
    store.close()
    return s3


def model_of(s3: S3, step: int) -> str:  # noqa: F811
    return next(key for key in s3.objects() if f"/checkpoint-{step}/" in key and key.endswith("model.pt"))


def test_commands_read_a_directory_at_a_url_and_prune_deletes_there(fastckpt, remote, tmp_path):
    before = remote.objects()
    items = fastckpt("ls", URL, "--json").document["checkpoints"]
    assert [(item["step"], item["state"]) for item in items] == [(30, "whole"), (20, "whole"), (10, "whole")]
    assert all(item["path"].startswith(f"{URL}/checkpoint-") for item in items)
    model = fastckpt("show", f"{URL}@20", "--json").document["files"][0]
    assert model["path"].endswith("/model.pt") and [entry["name"] for entry in model["entries"]][2] == "model.w"
    assert fastckpt("which", URL, "--verify", "--json").document["choice"]["step"] == 30
    said = fastckpt("verify", URL, "--all", "--json")
    assert said.code == 0 and said.document["good"] == 7
    said = fastckpt("diff", f"{URL}@10", f"{URL}@30", "--file", "model.pt", "--json")
    assert said.code == 1 and said.document["files"][0]["tensors"][0]["max_abs"] == 20
    out = tmp_path / "out"
    out.mkdir()
    assert fastckpt("export", f"{URL}@20", out / "m.safetensors", "--only", "model").code == 0
    assert torch.equal(load_file(out / "m.safetensors")["w"], torch.full((4, 3), 20.0))
    assert fastckpt("export", f"{URL}@20", out / "m.pt").code == 0
    assert fastckpt("diff", f"{URL}@20", out / "m.pt").code == 0
    assert sorted(path.name for path in out.iterdir()) == ["m.pt", "m.safetensors"]
    assert fastckpt("prune", URL, "--keep-last", "1").code == 0 and remote.objects() == before
    assert fastckpt("prune", URL, "--keep-last", "1", "--yes").code == 0
    assert [item["step"] for item in fastckpt("ls", URL, "--json").document["checkpoints"]] == [30]
    assert not any("/checkpoint-10/" in key for key in remote.objects())


def test_show_and_export_of_a_large_state_at_a_url_ask_for_what_they_need(fastckpt, s3, tmp_path, monkeypatch):  # noqa: F811
    store = RemoteStore(URL)
    publish(store, tmp_path, 1, {"w": torch.zeros(5_000_000), "step": 1})
    store.close()
    asked: list[int] = []
    read_range = reading._Remote.readinto

    def counted(self: Any, buffer: Any) -> int:
        before = self._start, len(self._ahead)
        count = read_range(self, buffer)
        asked.append(len(self._ahead) if (self._start, len(self._ahead)) != before else 0)
        return count

    with monkeypatch.context() as patch:
        patch.setattr(reading._Remote, "readinto", counted)
        said = fastckpt("show", URL, "--file", "model.pt", "--json")
    assert said.document["files"][0]["bytes"] == 20_000_000 and 0 < sum(asked) < 2_000_000
    recorder, source = Recorder(), find(f"{URL}@1", str(tmp_path))
    size = source.file("model.pt").size
    export_file(source.file("model.pt"), tmp_path / "m.pt", ExportOrder("torch"), source.check_unchanged, recorder)
    assert [stage[:3] for stage in recorder.stages[:2]] == [["verify", size, size], ["download", size, size]]
    deed, total, done, _ = recorder.stages[2]
    assert deed == "write" and total == done > 0


def test_verify_finds_damage_at_a_url_and_a_failing_store_is_an_error(fastckpt, remote):
    key = model_of(remote, 30)
    data = bytearray(remote.fs.cat_file(key))
    data[len(data) // 2] ^= 1
    remote.fs.pipe_file(key, bytes(data))
    assert fastckpt("ls", URL, "--json").document["checkpoints"][0]["whole"]
    said = fastckpt("verify", URL, "--json")
    [bad] = [finding for finding in said.document["findings"] if finding["verdict"] == "bad"]
    assert said.code == 1 and bad["path"] == f"s3://{key}" and bad["found"] != bad["expected"]
    assert fastckpt("which", URL, "--verify", "--json").document["choice"]["step"] == 20
    remote.fs.rm_file(key)
    newest = fastckpt("ls", URL, "--json").document["checkpoints"][0]
    assert (newest["step"], newest["history"], newest["state"]) == (30, 1, "damaged")
    assert fastckpt("verify", URL).code == 1
    remote.inject(Fault(403, "GET", times=10**6))
    for command, url in (*((each, URL) for each in ("ls", "show", "verify", "which")), ("ls", "strange://bucket/run")):
        said = fastckpt(command, url, "--json")
        assert said.code == 2 and not said.out and url in said.err


def test_a_lost_directory_is_found_in_its_remote_store(fastckpt, remote, tmp_path, recorded_steps):
    lost, local = tmp_path / "lost", f"file://{recorded_steps}"
    both = [lost, "--remote", URL]
    for command in ("ls", "which", "verify", "prune", "report"):
        said = fastckpt(command, lost, *(["--keep-last", "1"] if command == "prune" else []))
        assert said.code == 2 and not said.out and "no directory" in said.err
    assert [item["tier"] for item in fastckpt("ls", *both, "--json").document["checkpoints"]] == ["remote"] * 3
    choice = fastckpt("which", *both, "--verify", "--json").document["choice"]
    assert (choice["step"], choice["tier"]) == (30, "remote")
    assert fastckpt("verify", f"{lost}@20:remote", "--remote", URL, "--json").document["good"] == 2
    for asked, url in ((both, URL), ([URL], URL), ([f"file://{lost}", "--remote", local], local)):
        held = fastckpt("report", *asked, "--json").document["remote"]
        assert (held["location"], held["checkpoints"], held["newest"]["step"]) == (url, 3, 30)
    shown = fastckpt("report", *both).out
    assert f"{URL} holds 3 whole checkpoints; the newest is step 30 of history 1" in shown and "--fast-events" in shown
    assert fastckpt("prune", *both, "--keep-last", "2", "--json").document["freed"] > 0
    assert len(fastckpt("ls", URL, "--json").document["checkpoints"]) == 3, "not without --yes"
    assert fastckpt("prune", *both, "--keep-last", "2", "--yes").code == 0
    assert [item["step"] for item in fastckpt("ls", *both, "--json").document["checkpoints"]] == [30, 20]
    assert not lost.exists(), "who looks makes nothing"


def test_prune_decides_for_each_tier_by_its_own_checkpoints(fastckpt, remote, three):
    assert fastckpt("prune", three, "--remote", URL, "--keep-last", "1", "--yes").code == 0
    found = fastckpt("ls", three, "--remote", URL, "--json").document["checkpoints"]
    assert [(item["step"], item["tier"]) for item in found] == [(30, "storage"), (30, "remote")]
    said = fastckpt("show", "s3://nowhere/run")
    assert said.code == 2 and "nowhere" in said.err
