"""A checkpoint directory as real saves and crashes left it, and its states."""

import shutil
from pathlib import Path
from typing import Any

import torch

from fastckpt._core.format.ids import SaveId
from fastckpt._core.snapshot.rng_state import rng_state
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.share import Share
from fastckpt.ddp import DdpCheckpointer, StorageType

STEPS = (1, 2, 3)
NAME = "run"
"""The checkpoint directory in a user's home."""
FILES = {
    "thesis.tex": "years of work\n" * 100,
    ".bashrc": "# mine\n",
    "project/train.py": "import torch\n",
    "project/manifest.json": "{}",
    "project/tmp-keep/notes": "keep\n",
}
"""What else a user has there, also under names that are ours elsewhere."""


def state_of(step: int) -> dict[str, Any]:
    """What was saved under a step."""
    wide = torch.full((64, 8), float(step), dtype=torch.bfloat16)
    return {"w": torch.full((3000,), float(step)), "b": wide, "step": step, "more": {"of": [step, "x" * 50]}}


def step_of(state: dict[str, Any]) -> int | None:
    """The step under which this state was saved, bit for bit; None if it was under none, 0 for no state at all."""
    if not state:
        return 0
    return next((step for step in range(1, 100) if state.get("step") == step and _same(state, state_of(step))), None)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    plain = [{name: value for name, value in each.items() if name not in ("w", "b")} for each in (one, other)]
    return plain[0] == plain[1] and all(
        isinstance(one.get(name), torch.Tensor) and one[name].dtype == other[name].dtype
        and torch.equal(one[name], other[name]) for name in ("w", "b")
    )  # fmt: skip


def _save_replicated(home: Path) -> None:
    directory = home / NAME
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.load_checkpoint()
        paths = {1: directory / "first.pt", 2: home / "models/best.pt", 3: ""}
        for step in STEPS:
            path, metrics = str(paths[step]), {"loss": 1 / step}
            own = {"sampler": [step]}
            checkpointer.save_checkpoint(step, state_of(step), path, StorageType.DISK, metrics=metrics, rank_state=own)
            assert checkpointer.wait_latest_checkpoint(60)


def _save_and_leave(home: Path) -> None:
    """Add what crashes, faults and earlier versions leave: each by the rename, or copy, that they died after."""
    _save_replicated(home)
    directory, store = home / NAME, CheckpointDirectory(home / NAME)
    private = directory / ".fastckpt"
    for number in (1, 2):
        _publish_of_nodes(store, step=3 + number, nodes=range(number, 2) if number == 1 else range(2))
    for kind in ("tmp", "dropped", "deleted"):
        shutil.copytree(directory / "checkpoint-1", private / f"{kind}-{0:012}")
    (private / f"tmp-{0:012}/model.pt").unlink()
    apart = private / f"dropped-{1:012}"  # of a directory that could not be renamed
    shutil.copytree(directory / "checkpoint-1", directory / "checkpoint-0")
    apart.mkdir()
    (directory / "checkpoint-0/manifest.json").rename(apart / "manifest.json")
    (apart / "remains").write_text("checkpoint-0")
    shutil.copytree(directory / "checkpoint-1", directory / "checkpoint-9")
    with (directory / "checkpoint-9/manifest.json").open("ab") as file:
        file.write(b"}")
    quarantined = store.quarantine(directory / "checkpoint-9", "its manifest is damaged")
    quarantined.rename(private / f"quarantine-checkpoint-9-{0:012}")  # the same name each time
    (directory / "checkpoint-1").rename(private / f"retired-{0:012}")


def _publish_of_nodes(store: CheckpointDirectory, step: int, nodes: range) -> None:
    """Parts of a checkpoint of two nodes, which nobody has published."""
    images = store.path.parent / f"images-{step}"
    images.mkdir()
    for node in nodes:
        files = {f"rank_{node}.pt": {"state": {}, "rng": rng_state()}} | ({} if node else {"model.pt": state_of(step)})
        for name, content in files.items():
            torch.save(content, images / name)
        ranks = {str(node): [*files, "model.pt"][:2]}
        paths = {name: images / name for name in files}
        request = PublishRequest(SaveId(1, step), paths, world_size=2, details={"ranks": ranks, "num_threads": 1})
        store.contribute(request, Share(node, 2, "ab" * 4))
    shutil.rmtree(images)


def save(home: Path) -> None:
    """Have a directory in a user's home."""
    home.mkdir()
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    _save_and_leave(home)
