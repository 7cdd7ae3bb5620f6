"""Checkpoint directories as real saves wrote them, and their states."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import DdpCheckpointer, StorageType
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


def _save_shard(home: Path) -> None:
    with one_process():
        sharded, checkpointer = Sharded(), FsdpShardCheckpointer(home / NAME)
        checkpointer.load_checkpoint(sharded.model, sharded.optimizer)
        for step in STEPS:
            sharded.fill(step)
            checkpointer.save_checkpoint(step, sharded.model, sharded.optimizer, storage_type=StorageType.DISK)
            assert checkpointer.wait_latest_checkpoint(60)
        checkpointer.close()


def _save_left(home: Path) -> None:
    """A checkpoint of each kind of path, and a damaged one in quarantine."""
    directory = home / NAME
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.load_checkpoint()
        for step, path in zip(STEPS, (directory / "first.pt", home / "models/best.pt", ""), strict=True):
            own = {"sampler": [step, "0"]}
            checkpointer.save_checkpoint(step, state_of(step), str(path), StorageType.DISK, rank_state=own)
            assert checkpointer.wait_latest_checkpoint(60)
    shutil.copytree(directory / "checkpoint-1", directory / "checkpoint-9")
    (directory / "checkpoint-9/manifest.json").write_text("}")
    found = CheckpointDirectory(directory).quarantine(directory / "checkpoint-9", "its manifest is damaged")
    found.rename(found.with_name(f"quarantine-checkpoint-9-{0:012}"))  # the same name each time


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save(kind: str, home: Path) -> None:
    """Have a directory of a kind in a user's home."""
    home.mkdir()
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    {"left": _save_left, "shard": _save_shard}[kind](home)
