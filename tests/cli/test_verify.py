"""`fastckpt verify`: finds every damage and reports nothing else."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.format.ids import SaveId
from fastckpt._core.inspect import verify
from fastckpt._core.memory import slots
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.stored import digest
from tests.cli import harm
from tests.cli.conftest import Fastckpt, publish

pytestmark = pytest.mark.usefixtures("no_waiting")
FILES = ["checkpoint-30/model.pt", "checkpoint-30/rank_0.pt", "checkpoint-30/manifest.json"]
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody publishes here while the tracker is looked at."""
    monkeypatch.setattr(verify, "LOOKS", ())


def test_verify_finds_nothing_in_an_undamaged_directory(fastckpt: Fastckpt, three: Path):
    said = fastckpt("verify", three, "--all", "--json")
    document = said.document
    assert (said.code, document["good"], document["bad"], document["unknown"]) == (0, 7, 0, 0)
    findings = {finding["path"]: finding for finding in document["findings"]}
    for step in (10, 20, 30):
        for name in ("model.pt", "rank_0.pt"):
            path = three / f"checkpoint-{step}" / name
            assert findings[str(path)] == {
                "step": step, "history": 1, "tier": "storage", "path": str(path), "verdict": "good", "why": "",
                "expected": digest(path), "found": digest(path),
            }  # fmt: skip


@pytest.mark.parametrize("options", [[], ["--all"]], ids=["newest", "all"])
@pytest.mark.parametrize("file", [*FILES, TRACKER])
@pytest.mark.parametrize("damage", harm.ALL, ids=lambda damage: damage.__name__)
def test_verify_finds_every_kind_of_damage(fastckpt: Fastckpt, three: Path, damage, file: str, options: list[str]):
    path = three / file
    saved = digest(path)
    damage(path)
    said = fastckpt("verify", three, *options, "--json")
    assert said.code == 1, said.out
    bad = [finding for finding in said.document["findings"] if finding["verdict"] == "bad"]
    named = [
        finding
        for finding in bad
        if finding["path"] in (str(path), str(path.parent)) and Path(file).stem in finding["why"]
    ]
    if file == TRACKER:
        named = [finding for finding in bad if finding["path"] == str(path) and finding["why"]]
    elif damage is harm.flip and file.endswith(".pt"):
        [finding] = named = [finding for finding in bad if finding["path"] == str(path)]
        assert (finding["expected"], finding["found"]) == (saved, digest(path))
    assert len(named) == 1, bad
    shown = fastckpt("verify", three, *options)
    assert shown.code == 1 and f"bad: {named[0]['path']}" in shown.out


@pytest.mark.parametrize("name", ["model.pt", "rank_0.pt"])
def test_verify_finds_a_flipped_bit_in_an_older_step(fastckpt: Fastckpt, three: Path, name: str):
    harm.flip(three / "checkpoint-10" / name)
    assert fastckpt("verify", three).code == 0  # the newest one is good
    assert fastckpt("verify", f"{three}@20").code == 0
    assert fastckpt("verify", f"{three}@10").code == 1
    assert fastckpt("verify", three, "--all").code == 1


def test_verify_reads_all_files_even_if_the_first_is_bad(fastckpt: Fastckpt, three: Path):
    for name in ("model.pt", "rank_0.pt"):
        harm.flip(three / "checkpoint-20" / name)
    assert fastckpt("verify", f"{three}@20", "--json").document["bad"] == 2


def test_verify_checks_a_file_at_a_path_of_the_user(fastckpt: Fastckpt, three: Path, tmp_path: Path):
    target = tmp_path / "best.pt"
    publish(three, 40, target=str(target))
    assert fastckpt("verify", three, "--all").code == 0
    harm.flip(target)
    said = fastckpt("verify", three, "--json")
    assert said.code == 1
    assert [f["path"] for f in said.document["findings"] if f["verdict"] == "bad"] == [
        str(three / "checkpoint-40/model.pt")
    ]


def test_verify_finds_a_lost_checkpoint_by_the_tracker(fastckpt: Fastckpt, three: Path):
    harm.lose(three / "checkpoint-30")
    said = fastckpt("verify", three, "--json")
    [finding] = [finding for finding in said.document["findings"] if finding["verdict"] == "bad"]
    assert finding["why"] == "it contains '30'; step 20 came last"


def test_a_checkpoint_published_during_verify_is_no_finding(fastckpt: Fastckpt, three: Path, monkeypatch):
    """A job renames the checkpoint first and moves the tracker then."""
    (three / TRACKER).write_text("20")
    monkeypatch.setattr(verify, "LOOKS", (0.0,))
    monkeypatch.setattr(
        verify.time, "sleep", lambda _: looked.append((three / TRACKER).write_text("30" * bool(looked)))
    )
    looked: list[int] = []
    (three / TRACKER).write_text("20")
    assert fastckpt("verify", three).code == 0 and len(looked) == 2


def test_verify_does_not_report_quarantined_checkpoints_again(fastckpt: Fastckpt, three: Path):
    harm.flip(three / "checkpoint-20/model.pt")
    store = CheckpointDirectory(three)
    store.quarantine(next(s for s in store.checkpoints() if s.id == SaveId(1, 20)), "bits flipped")
    assert fastckpt("verify", three, "--all").code == 0
    said = fastckpt("verify", f"{three}@20", "--json")
    assert said.code == 1 and said.document["findings"][0]["why"] == "bits flipped"


def test_verify_ignores_a_checkpoint_of_another_tool(fastckpt: Fastckpt, three: Path):
    other = three / "checkpoint-500"
    other.mkdir()
    (other / "trainer_state.json").write_text("{}")
    assert fastckpt("verify", three, "--all").code == 0


def test_verify_checks_memory_by_its_digests(fastckpt: Fastckpt, directory: Path):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(7, {"w": torch.ones(1000)}, storage_type=StorageType.MEMORY)
        [slot] = [slot for slot in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*") if slots.read(slot).committed]
        slots.write_digests(slot, SaveId(1, 7), {name: digest(slot / name) for name in slots.read(slot).files})
        said = fastckpt("verify", directory, "--json")
        assert said.code == 0 and said.document["good"] == 2
        assert {finding["tier"] for finding in said.document["findings"]} == {"memory"}
        harm.flip(slot / "model.pt")
        said = fastckpt("verify", f"{directory}@7:memory", "--json")
        assert said.code == 1
        [bad] = [finding for finding in said.document["findings"] if finding["verdict"] == "bad"]
        assert bad["path"] == str(slot / "model.pt") and bad["found"] == digest(slot / "model.pt") != bad["expected"]


def test_verify_calls_memory_without_digests_neither_good_nor_bad(fastckpt: Fastckpt, directory: Path):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(7, {"w": torch.ones(10)}, storage_type=StorageType.MEMORY)
        [slot] = [slot for slot in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*") if slots.read(slot).committed]
        (slot / ".digests").unlink(missing_ok=True)
        said = fastckpt("verify", f"{directory}@7", "--json")
        assert said.code == 0
        assert (said.document["good"], said.document["unknown"]) in ((0, 2), (2, 0))  # the saver may have been here


def test_a_slot_overwritten_during_verify_is_not_called_bad(fastckpt: Fastckpt, directory: Path, monkeypatch):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(7, {"w": torch.ones(10)}, storage_type=StorageType.MEMORY)
        [slot] = [slot for slot in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*") if slots.read(slot).committed]
        slots.write_digests(slot, SaveId(1, 7), {name: digest(slot / name) for name in slots.read(slot).files})

        def digest_while_saving(path: Path, *_: object) -> str:
            with (slot / "model.pt").open("r+b") as file:
                file.write(b"new")
            slots.begin(slot, slots.SlotBegin(SaveId(1, 8), frozenset({0})))
            return digest(path)

        monkeypatch.setattr(verify, "digest_of", digest_while_saving)
        said = fastckpt("verify", f"{directory}@7:memory", "--json")
        assert said.code == 0 and said.document["unknown"] >= 1
        assert "while it was read" in said.document["findings"][0]["why"]


def test_a_checkpoint_deleted_by_its_job_during_verify_is_not_called_bad(fastckpt: Fastckpt, three: Path, monkeypatch):
    def digest_while_deleting(path: Path, *_: object) -> str:
        CheckpointDirectory(three).delete(SaveId(1, 10))
        return digest(path)

    monkeypatch.setattr(verify, "digest_of", digest_while_deleting)
    said = fastckpt("verify", f"{three}@10", "--json")
    assert (said.code, said.document["good"], said.document["unknown"]) == (0, 0, 2), said.out
    assert "deleted it, while it was read" in said.document["findings"][0]["why"]


def test_verify_does_not_wait_for_a_pipe_in_place_of_the_tracker(fastckpt: Fastckpt, three: Path):
    (three / TRACKER).unlink()
    os.mkfifo(three / TRACKER)
    said = fastckpt("verify", three)
    assert said.code == 1 and TRACKER in said.out


def test_verify_of_a_directory_without_checkpoints_is_an_error(fastckpt: Fastckpt, three: Path, tmp_path: Path):
    said = fastckpt("verify", f"{three}@99")
    assert said.code == 2 and "@99" in said.err and not said.out
    (tmp_path / "empty").mkdir()
    assert fastckpt("verify", tmp_path / "empty").code == 2
    said = fastckpt("verify", f"{three}@10", "--all")
    assert said.code == 2 and "--all" in said.err


def test_verify_finds_nothing_in_a_directory_that_was_moved(fastckpt: Fastckpt, three: Path, tmp_path: Path):
    moved = shutil.move(three, tmp_path / "moved@7")
    assert fastckpt("verify", moved, "--all").code == 0
    assert fastckpt("verify", f"{moved}@20").code == 0
