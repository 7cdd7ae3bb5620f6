"""Checkpoints of earlier versions: they load, and count as before.

Each archive is a checkpoint directory with steps 1 and 2 of two ranks, written by the version before manifests named
the files of each rank.
"""

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import Manifest
from fastckpt._core.memory import slots
from fastckpt._core.native.folder_checkpointer import FolderCheckpointer, RequiredFiles
from fastckpt._core.policy.retention import KeepLast
from fastckpt._core.retention import obsolete
from fastckpt._core.saver.slot import Slot
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import DdpCheckpointer
from fastckpt.fsdp import FsdpShardCheckpointer
from fastckpt_run.cli import main
from tests.e2e.ddp.conftest import Ranks

HERE = Path(__file__).parent
KINDS = ["ddp", "fsdp", "folder"]


def weights(step: int) -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).reshape(3, 4) + step


def unpacked(kind: str, path: Path) -> Path:
    with tarfile.open(HERE / f"{kind}.tar.xz") as archive:
        archive.extractall(path, filter="data")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_complete_checkpoints_of_earlier_versions_load_with_equal_values(
    directory: Path, kind: str, capsys: pytest.CaptureFixture[str]
):
    storage = CheckpointDirectory(unpacked(kind, directory))
    stored = storage.checkpoints()
    assert [each.id for each in stored] == [(1, 2), (1, 1)] and storage.scan().damaged == []
    for each in stored:
        storage.verify(each)
    assert obsolete(KeepLast(1), stored) == [(1, 1)]
    with pytest.raises(SystemExit) as ended:
        main(["which", str(directory), "--json"])
    assert ended.value.code in (0, None)
    assert json.loads(capsys.readouterr().out)["choice"]["step"] == 2


def test_a_checkpoint_of_an_earlier_version_that_lacks_a_rank_does_not_count(directory: Path):
    """That version took it for whole; one rank loads it still."""
    place = unpacked("ddp", directory) / "checkpoint-2"
    manifest = Manifest.from_json((place / "manifest.json").read_text())
    files = tuple(entry for entry in manifest.files if entry.name != "rank_1.pt")
    (place / "manifest.json").write_text(replace(manifest, files=files).to_json())
    storage = CheckpointDirectory(directory)
    assert [each.id for each in storage.checkpoints()] == [(1, 1)] and storage.scan().damaged == []
    with DdpCheckpointer(directory) as checkpointer:
        assert torch.equal(checkpointer.load_checkpoint()["w"], weights(2))


def test_ddp_ranks_load_checkpoints_of_earlier_versions(ranks: Ranks, directory: Path):
    unpacked("ddp", directory)
    members = ranks.start(2)
    for rank, state in enumerate(ranks.load()):
        assert torch.equal(state["w"], weights(2)) and state["step"] == members[rank].loaded_step == 2
        assert members[rank].rank_state == {"position": 20 + rank}


def test_sharded_models_load_checkpoints_of_earlier_versions(directory: Path):
    unpacked("fsdp", directory)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with FsdpShardCheckpointer(directory) as checkpointer:
        checkpointer.load_checkpoint(model, optimizer)
        assert checkpointer.loaded_step == 2 and checkpointer.rank_state == {"position": 20}
    assert torch.equal(model.weight.detach(), weights(2)) and torch.equal(model.bias.detach(), torch.full((3,), 2.0))


def test_framework_files_of_earlier_versions_are_found(directory: Path):
    unpacked("folder", directory)
    with FolderCheckpointer(directory, RequiredFiles("config.json", "state_0.pt")) as checkpointer:
        found = checkpointer.find()
        assert found is not None and (found.step, found.path.name) == (2, "global_step2")
        assert torch.equal(torch.load(found.path / "state_0.pt", weights_only=True)["w"], weights(2))


@pytest.mark.parametrize("gone", [False, True], ids=["of all ranks", "of those that had not left"])
def test_memory_of_an_earlier_version_counts_if_it_has_all_ranks(tmp_path: Path, gone: bool):
    details: dict[str, Any] = {"world_size": 2, "num_threads": 1, "path": "", "parent": None}
    files = {0: ["model.pt", "rank_0.pt"]} | ({} if gone else {1: ["rank_1.pt"]})
    slots.begin(tmp_path, slots.SlotBegin(SaveId(1, 5), frozenset(files)))
    for rank, names in files.items():
        for name in names:
            (tmp_path / name).write_bytes(b"x")
        slots.commit(tmp_path, rank, slots.SlotDone(SaveId(1, 5), dict.fromkeys(names, 1), details))
    slot = Slot(tmp_path)
    slot.recover()
    assert slot.committed is not gone
    assert ("not for all of 2 ranks: rank_1.pt missing" in slot.lost) is gone
