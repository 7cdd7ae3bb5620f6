"""Checkpoint directories as real saves wrote them, and their states; a job that goes on runs ``saved.py HOME``."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[3]))
from fastckpt._core.format.ids import SaveId
from fastckpt._core.snapshot.rng_state import rng_state
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.share import Share
from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.fsdp import FsdpShardCheckpointer

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


class Sharded:
    """A model and its optimizer whose numbers are all that of a step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(40, 30)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(2, 40)).sum().backward()
        self.optimizer.step()

    def _tensors(self) -> list[DTensor]:
        moments = [each[name] for each in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*self.model.parameters(), *moments]

    def fill(self, step: int) -> None:
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.to_local().fill_(float(step))

    @property
    def step(self) -> int | None:
        """The one whose state this is, bit for bit; None if it is that of none."""
        values = {value for tensor in self._tensors() for value in tensor.full_tensor().unique().tolist()}
        return int(values.pop()) if len(values) == 1 else None


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


def _save_next(home: Path) -> None:
    """Resume what is there, save one more, and have the others deleted."""
    directory = home / NAME
    with DdpCheckpointer(directory, KeepLatestStepStrategy(1, str(directory))) as checkpointer:
        assert step_of(checkpointer.load_checkpoint()) == checkpointer.loaded_step > 0
        checkpointer.save_checkpoint(50, state_of(50), storage_type=StorageType.DISK)
        assert checkpointer.wait_latest_checkpoint(60)


def _save_sharded(home: Path) -> None:
    with one_process():
        sharded, checkpointer = Sharded(), FsdpShardCheckpointer(home / NAME)
        checkpointer.load_checkpoint(sharded.model, sharded.optimizer)
        for step in STEPS:
            sharded.fill(step)
            checkpointer.save_checkpoint(step, sharded.model, sharded.optimizer, storage_type=StorageType.DISK)
            assert checkpointer.wait_latest_checkpoint(60)
        checkpointer.close()


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


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


SAVES: dict[str, Callable[[Path], None]] = {"left": _save_and_leave, "shard": _save_sharded}
"""How a directory is saved, by kind."""


def save(kind: str, home: Path) -> None:
    """Have a directory of a kind in a user's home."""
    home.mkdir()
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    SAVES[kind](home)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _save_next(Path(sys.argv[1]))
    dist.destroy_process_group()
