"""The training with the checkpointers for FSDP: sharded in one of several ways, or as one full state."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastckpt.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer, SaveResult, StorageType
from tests.faults import training
from tests.faults.training import Run, Training


def build(way: str) -> nn.Module:
    """Odd sizes: shards are padded, and some are empty. Ways are fsdp2, fsdp1, tp, full and full1."""
    torch.manual_seed(7)
    world = dist.get_world_size()
    model = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 5))
    if way in ("fsdp1", "full1"):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    if way == "tp":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state, which the first rank has. (torch's own way ends FSDP1 on a processor with a signal.)"""
    return _whole(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)))


def _whole(node: Any) -> Any:
    if isinstance(node, DTensor):
        return node.full_tensor().clone()
    if isinstance(node, ShardedTensor):
        out = torch.empty(node.size(), dtype=node.dtype) if dist.get_rank() == 0 else None
        node.gather(0, out, dtype=node.dtype)
        return out
    if isinstance(node, dict):
        return {name: _whole(child) for name, child in node.items()}
    return node.clone() if isinstance(node, torch.Tensor) else node


class Fsdp(Training):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        args, way = self.args, self.args.way or "fsdp2"
        self.model = self.trained = build(way)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        # ranks that share a tensor's parts take the same batch, and drop the same of it
        torch.manual_seed(11 + (0 if way == "tp" else self.rank))
        kind = FsdpFullCheckpointer if way in ("full", "full1") else FsdpShardCheckpointer
        self.checkpointer = kind(args.checkpoint_dir, overlap=self.optimizer if args.overlap else None)
        self._more: dict[str, Any] = {"step": 0, "table": torch.zeros(100), "text": ""}

    def resume(self) -> int:
        self._more = self.checkpointer.load_checkpoint(self.model, self.optimizer) or self._more
        assert self._more["step"] == max(0, self.checkpointer.loaded_step)
        return int(self._more["step"])

    def advance(self, step: int) -> torch.Tensor:
        self._more["table"] += step
        return super().advance(step)

    def save(self, step: int, place: StorageType) -> SaveResult:
        self._more |= {"step": step, "nested": [{"odd": [1, "b"]}, ("a", step)]}
        parts: Any = {"model": self.model, "optimizer": self.optimizer, "extra_sd": self._more}
        return self.checkpointer.save_checkpoint(step, storage_type=place, **parts)

    def whole(self) -> Any:
        full = full_state(self.model, self.optimizer)
        return {**(full if self.rank == 0 else {}), "table": self._more["table"], "text": self._more["text"]}


if __name__ == "__main__":
    training.main(Fsdp, training.parser().parse_args())
