"""`fastckpt verify`: finds every damage and reports nothing else."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.format.ids import SaveId
from fastckpt._core.inspect import verify
from fastckpt._core.memory import slots
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.stored import digest
from tests.cli import harm
from tests.cli.conftest import Said, publish, quarantine

TRACKER = "latest_checkpointed_iteration.txt"
MODEL, MANIFEST = "checkpoint-30/model.pt", "checkpoint-30/manifest.json"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    """Nobody publishes here while the tracker is looked at."""
    monkeypatch.setattr(verify, "LOOKS", ())


def bad(said: Said) -> list[dict[str, Any]]:
    assert said.code == 1, said.out
    return [finding for finding in said.document["findings"] if finding["verdict"] == "bad"]


def test_verify_finds_nothing_in_a_sound_directory_and_names_what_is_quarantined_when_asked_alone(
    fastckpt, three, tmp_path
):
    (three / "checkpoint-500").mkdir()
    (three / "checkpoint-500/trainer_state.json").write_text("{}")
    said = fastckpt("verify", three, "--all", "--json")
    document = said.document
    assert (said.code, document["good"], document["bad"], document["unknown"]) == (0, 7, 0, 0)
    path = three / "checkpoint-20/rank_0.pt"
    [finding] = [each for each in document["findings"] if each["path"] == str(path)]
    told = {"step": 20, "history": 1, "tier": "storage", "path": str(path), "verdict": "good", "why": ""}
    assert finding == told | {"expected": digest(path), "found": digest(path)}
    quarantine(three, 20)
    assert fastckpt("verify", three, "--all").code == 0
    said = fastckpt("verify", f"{three}@20", "--json")
    assert said.code == 1 and said.document["findings"][0]["why"] == "bits flipped"
    (tmp_path / "empty").mkdir()
    for arguments in ([f"{three}@99"], [tmp_path / "empty"], [f"{three}@10", "--all"]):
        said = fastckpt("verify", *arguments)
        assert said.code == 2 and str(arguments[-1]) in said.err and not said.out


@pytest.mark.parametrize("file", [MODEL, MANIFEST, TRACKER])
def test_verify_finds_every_kind_of_damage(fastckpt, recorded_steps, tmp_path, file):
    for damage in harm.ALL:
        run = shutil.copytree(recorded_steps, tmp_path / damage.__name__)
        path = run / file
        saved = digest(path)
        damage(path)
        places = (str(path),) if file == TRACKER else (str(path), str(path.parent))
        found = [one for one in bad(fastckpt("verify", run, "--json")) if one["path"] in places]
        [named] = [one for one in found if path.stem in one["path"] + one["why"]]
        if damage is harm.flip and file == MODEL:
            assert (named["path"], named["expected"], named["found"]) == (str(path), saved, digest(path))


def test_verify_reads_all_files_of_the_asked_steps_alone(fastckpt, three, tmp_path):
    publish(three, 40, target=str(tmp_path / "best.pt"))
    for name in ("model.pt", "rank_0.pt"):
        harm.flip(three / "checkpoint-10" / name)
    assert fastckpt("verify", three).code == fastckpt("verify", f"{three}@20").code == 0
    assert len(bad(fastckpt("verify", f"{three}@10", "--json"))) == 2
    shown = fastckpt("verify", three, "--all")
    assert shown.code == 1 and f"bad: {three / 'checkpoint-10/model.pt'}" in shown.out
    harm.flip(tmp_path / "best.pt")
    [finding] = bad(fastckpt("verify", three, "--json"))
    assert finding["path"] == str(three / "checkpoint-40/model.pt")


def test_verify_finds_a_lost_checkpoint_by_the_tracker(fastckpt, three, monkeypatch):
    harm.lose(three / "checkpoint-30")
    [finding] = bad(fastckpt("verify", three, "--json"))
    assert finding["why"] == "it contains '30'; step 20 came last"
    (three / TRACKER).unlink()
    os.mkfifo(three / TRACKER)
    assert TRACKER in bad(fastckpt("verify", three, "--json"))[0]["path"], "it is not waited for"
    (three / TRACKER).unlink()
    (three / TRACKER).write_text("30")
    # A job renames the checkpoint first and moves the tracker then.
    looked: list[int] = []
    monkeypatch.setattr(verify, "LOOKS", (0.0,))
    monkeypatch.setattr(verify.time, "sleep", lambda _: looked.append((three / TRACKER).write_text("20" * len(looked))))
    assert fastckpt("verify", three).code == 0 and len(looked) == 2


def test_verify_checks_memory_by_its_digests(fastckpt, directory, monkeypatch):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(7, {"w": torch.ones(1000)}, storage_type=StorageType.MEMORY)
        [slot] = [slot for slot in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*") if slots.read(slot).committed]
        (slot / ".digests").unlink(missing_ok=True)
        said = fastckpt("verify", f"{directory}@7", "--json")
        assert said.code == 0
        assert (said.document["good"], said.document["unknown"]) in ((0, 2), (2, 0))  # the saver may have been here
        slots.write_digests(slot, SaveId(1, 7), {name: digest(slot / name) for name in slots.read(slot).files})
        said = fastckpt("verify", directory, "--json")
        assert said.code == 0 and said.document["good"] == 2
        assert {finding["tier"] for finding in said.document["findings"]} == {"memory"}
        harm.flip(slot / "model.pt")
        [finding] = bad(fastckpt("verify", f"{directory}@7:memory", "--json"))
        assert finding["path"] == str(slot / "model.pt")
        assert finding["found"] == digest(slot / "model.pt") != finding["expected"]

        def digest_while_saving(path: Path, *_: object) -> str:
            slots.begin(slot, slots.SlotBegin(SaveId(1, 8), frozenset({0})))
            return digest(path)

        monkeypatch.setattr(verify, "digest_of", digest_while_saving)
        said = fastckpt("verify", f"{directory}@7:memory", "--json")
        assert said.code == 0 and said.document["unknown"] >= 1, "a slot that was overwritten is not bad"
        assert "while it was read" in said.document["findings"][0]["why"]


def test_a_checkpoint_deleted_by_its_job_during_verify_is_not_called_bad(fastckpt, three, monkeypatch):
    def digest_while_deleting(path: Path, *_: object) -> str:
        CheckpointDirectory(three).delete(SaveId(1, 10))
        return digest(path)

    monkeypatch.setattr(verify, "digest_of", digest_while_deleting)
    said = fastckpt("verify", f"{three}@10", "--json")
    assert (said.code, said.document["good"], said.document["unknown"]) == (0, 0, 2), said.out
    assert "deleted it, while it was read" in said.document["findings"][0]["why"]
