"""Two ranks, each with a model on a device mesh of its own, ask to save them as one state."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastckpt import Checkpointer
from fastckpt.errors import ConfigError
from fastckpt.fsdp import FsdpShardCheckpointer, StorageType


class Job:
    """Trains a step at a time; ``name`` is that of its layer."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))["shards"]
        self.model = nn.Sequential()
        self.model.add_module(name, nn.Linear(4, 4))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.model(torch.ones(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[list[float]]:
        return [parameter.to_local().flatten().tolist() for parameter in self.model.parameters()]


def in_three_lines(folder: Path, name: str, seed: int) -> str:
    job = Job(name, seed)
    with Checkpointer(folder, model=job.model, optimizer=job.optimizer, every=1) as checkpointer:
        checkpointer.resume()
        job.step()
        checkpointer.step(1)
    again = Job(name, seed + 10)
    with Checkpointer(folder, model=again.model, optimizer=again.optimizer, every=1) as checkpointer:
        return f"resumed {checkpointer.resume()}, equal: {again.weights() == job.weights()}"


def by_hand(folder: Path, name: str, seed: int) -> str:
    job = Job(name, seed)
    with FsdpShardCheckpointer(folder) as checkpointer:
        checkpointer.load_checkpoint(job.model, job.optimizer)
        job.step()
        checkpointer.save_checkpoint(1, job.model, job.optimizer, storage_type=StorageType.MEMORY)
    again = Job(name, seed + 10)
    with FsdpShardCheckpointer(folder) as checkpointer:
        checkpointer.load_checkpoint(again.model, again.optimizer)
        return f"resumed {checkpointer.loaded_step}, equal: {again.weights() == job.weights()}"


def main() -> None:
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), {}
    cases = {"own names": (str(rank), rank), "equal names": ("0", rank), "replicas": ("0", 5)}
    for way in (in_three_lines, by_hand):
        for case, (name, seed) in cases.items():
            try:
                said[f"{way.__name__}, {case}"] = way(Path(sys.argv[1]) / f"{way.__name__}-{case}", name, seed)
            except ConfigError as error:
                said[f"{way.__name__}, {case}"] = str(error)
            dist.barrier()
    (Path(sys.argv[1]) / f"said.{rank}").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
