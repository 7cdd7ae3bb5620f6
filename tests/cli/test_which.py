"""`fastckpt which`: the checkpoint that a resume then loads."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core.format.ids import SaveId
from fastckpt._core.inspect.inventory import WHOLE, Inventory, InventoryFile, InventoryItem
from fastckpt._core.inspect.which import REFUSE, decide
from fastckpt._core.memory import slots
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory, Share
from fastckpt.errors import NoLoadableCheckpoint
from tests.cli import harm
from tests.cli.conftest import Fastckpt, publish
from tests.support.live_folders import remove_live


def nothing(directory: Path) -> None:
    pass


def newest_flipped(directory: Path) -> None:
    harm.flip(directory / "checkpoint-30/model.pt")


def newest_truncated(directory: Path) -> None:
    harm.truncate(directory / "checkpoint-30/rank_0.pt")


def newest_manifest_flipped(directory: Path) -> None:
    harm.flip(directory / "checkpoint-30/manifest.json")


def newest_manifest_gone(directory: Path) -> None:
    harm.remove(directory / "checkpoint-30/manifest.json")


def newest_two_bad(directory: Path) -> None:
    newest_flipped(directory)
    harm.empty(directory / "checkpoint-20/model.pt")


def all_flipped(directory: Path) -> None:
    for step in (10, 20, 30):
        harm.flip(directory / f"checkpoint-{step}/model.pt")


def all_in_quarantine(directory: Path) -> None:
    store = CheckpointDirectory(directory)
    for stored in store.checkpoints():
        store.quarantine(stored, "bits flipped")


def newest_of_two_ranks_lacks_one(directory: Path) -> None:
    publish(directory, 40, world_size=2)


def rolled_back(directory: Path) -> None:
    publish(directory, 15, history=2, parent=SaveId(1, 10))


def all_gone(directory: Path) -> None:
    for step in (10, 20, 30):
        harm.lose(directory / f"checkpoint-{step}")


@pytest.mark.parametrize(
    ("harms", "outcome", "step"),
    [
        (nothing, "resume", 30),
        (newest_flipped, "resume", 20),
        (newest_truncated, "resume", 20),
        (newest_manifest_flipped, "resume", 20),
        (newest_manifest_gone, "resume", 20),
        (newest_two_bad, "resume", 10),
        (all_flipped, "refuse", None),
        (all_in_quarantine, "refuse", None),
        (rolled_back, "resume", 15),
        (all_gone, "fresh start", None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_launch_resumes_what_which_printed(
    fastckpt: Fastckpt, three: Path, harms: Callable[[Path], None], outcome: str, step: int | None
):
    harms(three)
    said = fastckpt("which", three, "--verify", "--json")
    assert said.document["outcome"] == outcome and said.code == (1 if outcome == "refuse" else 0)
    assert (said.document["choice"] or {}).get("step") == step
    assert all(other["why"] for other in said.document["others"])
    assert _resumed(three) == (outcome, step, "storage" if step else "")


def _resumed(directory: Path) -> tuple[str, int | None, str]:
    """What a real launch does."""
    with DdpCheckpointer(directory) as checkpointer:
        try:
            state = checkpointer.load_checkpoint()
        except NoLoadableCheckpoint:
            return "refuse", None, ""
        return ("resume", checkpointer.loaded_step, checkpointer.loaded_from) if state else ("fresh start", None, "")


def test_which_gives_the_reason_against_each_other_checkpoint(fastckpt: Fastckpt, three: Path):
    harm.truncate(three / "checkpoint-30/model.pt")
    publish(three, 40, world_size=2)
    publish(three, 50)
    store = CheckpointDirectory(three)
    store.quarantine(next(stored for stored in store.checkpoints() if stored.id.step == 50), "bits flipped")
    document = fastckpt("which", three, "--json").document
    assert document["choice"]["step"] == 20 and document["choice"]["path"] == str(three / "checkpoint-20")
    reasons = {other["step"]: other["why"] for other in document["others"]}
    assert list(reasons) == [50, 40, 30, 10]
    assert reasons[50] == "quarantined: bits flipped" and reasons[10] == "older"
    assert reasons[40] == "not for all of 2 ranks: rank_1.pt missing" and reasons[30].startswith("damaged: ")
    shown = fastckpt("which", three).out.splitlines()
    assert shown[0] == f"resume step 20 of history 1 from storage: {three / 'checkpoint-20'}"
    assert [line.split()[0] for line in shown[2:6]] == ["50", "40", "30", "10"]


def test_which_without_verification_does_not_read_tensors(fastckpt: Fastckpt, three: Path):
    newest_flipped(three)
    assert fastckpt("which", three, "--json").document["choice"]["step"] == 30
    assert fastckpt("which", three, "--verify", "--json").document["choice"]["step"] == 20


def test_which_prefers_memory_and_names_its_job(fastckpt: Fastckpt, directory: Path):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(1, {"w": torch.ones(2)}, storage_type=StorageType.DISK)
        checkpointer.wait_latest_checkpoint(60)
        document = fastckpt("which", directory, "--json").document
        assert (document["choice"]["step"], document["choice"]["tier"]) == (1, "memory")
        assert [(o["tier"], o["why"]) for o in document["others"]] == [("storage", "memory is nearer than storage")]
        assert document["jobs"][0]["pid"] == os.getpid()
        checkpointer.save_checkpoint(2, {"w": torch.ones(2)}, storage_type=StorageType.MEMORY)
        document = fastckpt("which", directory, "--json").document
        assert (document["choice"]["step"], document["choice"]["tier"]) == (2, "memory")
        assert "another launch is refused" in fastckpt("which", directory).out


def arena_slots() -> list[Path]:
    return sorted(Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*"))


def test_which_passes_over_slots_that_do_not_count(fastckpt: Fastckpt, directory: Path):
    with DdpCheckpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpoint(step, {"w": torch.ones(2)}, storage_type=StorageType.MEMORY)
        [newest] = [slot for slot in arena_slots() if slots.read(slot).committed == (1, 2)]
        [free] = [slot for slot in arena_slots() if slots.read(slot).committed is None]
        slots.begin(free, slots.SlotBegin(SaveId(1, 3), frozenset({0, 1})))
        slots.commit(free, 0, slots.SlotDone(SaveId(1, 3), {}))
        os.truncate(newest / "model.pt", 10)
        document = fastckpt("which", directory, "--json").document
        assert document["choice"]["step"] == 1
        reasons = {other["step"]: other["why"] for other in document["others"]}
        assert reasons[3] == "writing: local rank 1 has not saved its part yet"
        assert reasons[2].startswith("damaged: ") and str(newest / "model.pt") in reasons[2]
        states = {item["step"]: item["state"] for item in fastckpt("ls", directory, "--json").document["checkpoints"]}
        assert states == {3: "writing", 2: "damaged", 1: "whole"}


def test_which_ignores_memory_of_a_removed_directory(fastckpt: Fastckpt, directory: Path):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(1, {"w": torch.ones(2)}, storage_type=StorageType.MEMORY)
        while directory.exists():  # its record may be written just now
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        document = fastckpt("which", directory, "--json").document
        assert document["outcome"] == "fresh start" and document["choice"] is None
        assert document["others"][0]["why"].startswith("foreign: ")
    for arena in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():  # kept where the directory had a record already
        remove_live(arena)


def test_which_reports_checkpoints_of_other_tools_as_no_fresh_start(fastckpt: Fastckpt, directory: Path):
    (directory / "100").mkdir(parents=True)
    torch.save({"w": torch.ones(2)}, directory / "100/rank_0.pt")
    said = fastckpt("which", directory, "--json")
    assert said.document["outcome"] == "refuse" and said.code == 1


def test_which_prefers_the_remote_store_last(fastckpt: Fastckpt, three: Path, tmp_path: Path):
    far = tmp_path / "far"
    for step in (30, 40):
        publish(far, step)
    document = fastckpt("which", three, "--remote", far, "--json").document
    assert (document["choice"]["step"], document["choice"]["tier"]) == (40, "remote")
    harm.lose(far / "checkpoint-40")
    document = fastckpt("which", three, "--remote", far, "--json").document
    assert (document["choice"]["step"], document["choice"]["tier"]) == (30, "storage")
    assert document["others"][0]["why"] == "storage is nearer than remote"
    tiers = [item["tier"] for item in fastckpt("ls", three, "--remote", far, "--json").document["checkpoints"]]
    assert tiers == ["storage", "remote", "storage", "storage"]


def test_which_ignores_unpublished_parts_of_several_nodes(fastckpt: Fastckpt, three: Path):
    images = {"rank_1.pt": three.parent / "images-1-30/rank_0.pt"}
    CheckpointDirectory(three).contribute(PublishRequest(SaveId(1, 40), images, world_size=2), Share(1, 2))
    document = fastckpt("which", three, "--json").document
    assert document["choice"]["step"] == 30
    why = "writing: other nodes than 1 have not written their parts yet"
    assert (document["others"][0]["step"], document["others"][0]["why"]) == (40, why)
    assert fastckpt("verify", three, "--all").code == 0


def test_which_ignores_memory_of_one_node_that_lacks_shards_of_others() -> None:
    files = {
        name: InventoryFile(Path(name), 1) for name in (".metadata", "__0_0.distcp", "rank_0.pt", "node_0.metadata")
    }
    half = InventoryItem("memory", WHOLE, "", Path("slot-0"), 7, 1, files, world=2, details={"node": 0, "nodes": 2})
    decision = decide(Inventory("run", [half], []))
    assert decision.outcome == REFUSE
    assert decision.others == [(half, "not for all of 2 ranks: this node's memory has no __1_0.distcp")]
    alone = replace(half, world=1, details={})
    assert decide(Inventory("run", [alone], [])).choice is alone
