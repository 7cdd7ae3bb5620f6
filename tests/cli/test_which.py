"""`fastckpt ls` and `which`: the checkpoints of a directory, and the one that a resume then loads."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from tests.cli.conftest import publish, quarantine


def harmed(damage: Callable[[Path], None], file: str, *steps: int, directory: Path) -> None:
    for step in steps:
        damage(directory / f"checkpoint-{step}" / file)


def all_in_quarantine(directory: Path) -> None:
    for step in (10, 20, 30):
        quarantine(directory, step)


def of_another_tool(directory: Path) -> None:
    shutil.rmtree(directory)
    (directory / "100").mkdir(parents=True)
    torch.save({"w": torch.ones(2)}, directory / "100/rank_0.pt")


@pytest.mark.parametrize(
    ("harms", "outcome", "step"),
    [
        (partial(harmed, harm.flip, "model.pt", 30), "resume", 20),
        (partial(harmed, harm.truncate, "rank_0.pt", 30), "resume", 20),
        (partial(harmed, harm.remove, "manifest.json", 30), "resume", 20),
        (partial(harmed, harm.flip, "model.pt", 10, 20, 30), "refuse", None),
        (partial(harmed, harm.lose, "", 10, 20, 30), "fresh start", None),
        (all_in_quarantine, "refuse", None),
        (of_another_tool, "refuse", None),
        (partial(publish, step=15, history=2, parent=SaveId(1, 10)), "resume", 15),
    ],
)
def test_a_launch_resumes_what_which_printed(fastckpt, three, harms, outcome, step):
    harms(directory=three)
    said = fastckpt("which", three, "--verify", "--json")
    assert said.document["outcome"] == outcome and said.code == (1 if outcome == "refuse" else 0)
    assert (said.document["choice"] or {}).get("step") == step
    assert all(other["why"] for other in said.document["others"])
    assert _resumed(three) == (outcome, step, "storage" if step else "")


def _resumed(directory: Path) -> tuple[str, int | None, str]:
    with DdpCheckpointer(directory) as checkpointer:
        try:
            state = checkpointer.load_checkpoint()
        except NoLoadableCheckpoint:
            return "refuse", None, ""
        return ("resume", checkpointer.loaded_step, checkpointer.loaded_from) if state else ("fresh start", None, "")


def test_ls_names_checkpoints_of_other_tools_and_a_missing_directory(fastckpt, directory):
    said = fastckpt("ls", directory)
    assert said.code == 2 and str(directory) in said.err and not said.out
    directory.mkdir()
    assert fastckpt("ls", directory).out.splitlines()[1:] == ["no checkpoint of fastckpt is here"]
    torch.save({"w": torch.ones(2)}, directory / "last.pt")
    said = f"{directory}/last.pt seems to be of torch.save"
    for command in ("ls", "which"):
        assert fastckpt(command, directory).out.endswith(f"{said}: show, diff and export read it\n"), command
    assert f"{directory} has no checkpoint of fastckpt to check; {said}" in fastckpt("verify", directory).err


def test_which_gives_the_reason_against_each_other_checkpoint(fastckpt, three):
    harm.truncate(three / "checkpoint-30/model.pt")
    images = {"rank_1.pt": three / "checkpoint-30/rank_0.pt"}
    CheckpointDirectory(three).contribute(PublishRequest(SaveId(1, 60), images, world_size=2), Share(1, 2))
    publish(three, 40, world_size=2)
    publish(three, 50)
    quarantine(three, 50)
    harm.flip(three / "checkpoint-20/model.pt")  # which alone does not read tensors
    document = fastckpt("which", three, "--json").document
    assert document["choice"]["step"] == 20 and document["choice"]["path"] == str(three / "checkpoint-20")
    reasons = {other["step"]: other["why"] for other in document["others"]}
    assert list(reasons) == [60, 50, 40, 30, 10]
    assert reasons[60] == "writing: other nodes than 1 have not written their parts yet"
    assert reasons[50] == "quarantined: bits flipped" and reasons[10] == "older"
    assert reasons[40] == "not for all of 2 ranks: rank_1.pt missing" and reasons[30].startswith("damaged: ")
    listed = fastckpt("ls", three, "--json").document["checkpoints"]
    assert [(one["state"], one["whole"], one["why"]) for one in listed if one["step"] == 40] == [
        ("incomplete", False, reasons[40])
    ]
    said = fastckpt("verify", f"{three}@40")
    assert said.code == 1 and reasons[40] in said.out


def test_which_prefers_memory_names_its_job_and_passes_over_slots_that_do_not_count(fastckpt, directory):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(1, {"w": torch.ones(2)}, storage_type=StorageType.DISK)
        checkpointer.wait_latest_checkpoint(60)
        document = fastckpt("which", directory, "--json").document
        assert (document["choice"]["step"], document["choice"]["tier"]) == (1, "memory")
        assert [(o["tier"], o["why"]) for o in document["others"]] == [("storage", "memory is nearer than storage")]
        assert document["jobs"][0]["pid"] == os.getpid()
        checkpointer.save_checkpoint(2, {"w": torch.ones(2)}, storage_type=StorageType.MEMORY)
        assert fastckpt("which", directory, "--json").document["choice"]["step"] == 2
        assert "another launch is refused" in fastckpt("which", directory).out
        found = {path: slots.read(path).committed for path in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*")}
        [newest] = [path for path, committed in found.items() if committed == (1, 2)]
        [free] = [path for path, committed in found.items() if committed is None]
        slots.begin(free, slots.SlotBegin(SaveId(1, 3), frozenset({0, 1})))
        slots.commit(free, 0, slots.SlotDone(SaveId(1, 3), {}))
        os.truncate(newest / "model.pt", 10)
        document = fastckpt("which", directory, "--json").document
        assert (document["choice"]["step"], document["choice"]["tier"]) == (1, "memory")
        reasons = {other["step"]: other["why"] for other in document["others"]}
        assert reasons[3] == "writing: local rank 1 has not saved its part yet"
        assert reasons[2].startswith("damaged: ") and str(newest / "model.pt") in reasons[2]
        items = fastckpt("ls", directory, "--json").document["checkpoints"]
        assert {item["step"]: item["state"] for item in items} == {3: "writing", 2: "damaged", 1: "whole"}
        assert all(abs(item["time"] - time.time()) < 600 > item["age"] >= 0 for item in items if item["step"] == 1)
        shown = fastckpt("ls", directory).out
        assert "\ndamaged: " in shown and "in use by process" in shown


def test_which_ignores_memory_of_one_node_that_lacks_shards_of_others():
    names = (".metadata", "__0_0.distcp", "rank_0.pt", "node_0.metadata")
    files = {name: InventoryFile(Path(name), 1) for name in names}
    half = InventoryItem("memory", WHOLE, "", Path("slot-0"), 7, 1, files, world=2, details={"node": 0, "nodes": 2})
    decision = decide(Inventory("run", [half], []))
    assert decision.outcome == REFUSE
    assert decision.others == [(half, "not for all of 2 ranks: this node's memory has no __1_0.distcp")]
    alone = replace(half, world=1, details={})
    assert decide(Inventory("run", [alone], [])).choice is alone
