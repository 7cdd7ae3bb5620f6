"""Saves a model as it is sharded in one way, and loads it as it is sharded in others; says whether they are equal."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastckpt.dcp import SharedMemoryReader, SharedMemoryWriter
from tests.e2e.dcp.states import same

TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(9, 12), torch.nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


def shard(kind: str, model: torch.nn.Module) -> torch.nn.Module:
    world = dist.get_world_size()
    match kind:
        case "ddp":
            return torch.nn.parallel.DistributedDataParallel(model)
        case "fsdp":
            return fully_shard(model)
        case "hsdp":
            return fully_shard(
                model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
            )
        case "tp":
            return parallelize_module(model, init_device_mesh("cpu", (world,)), TENSOR_PARALLEL)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    return fully_shard(model, mesh=mesh["dp"])


def trained(kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard(kind, Network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 9)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    writer = SharedMemoryWriter(arguments.out / "checkpoints")
    reader = SharedMemoryReader(writer)
    for step, kind in enumerate(arguments.kinds if arguments.save else [], start=1 + (reader.find() or 0)):
        model, optimizer = trained(kind, step)
        sharded, moments = get_state_dict(model, optimizer)
        dcp.save({"model": sharded, "optimizer": moments}, storage_writer=writer, checkpoint_id=str(step))
        whole = get_state_dict(model, optimizer, options=FULL)
        if rank == 0:
            torch.save(whole, arguments.out / f"full.{step}")
        dist.barrier()
    for step in range(1, 1 + len(list(arguments.out.glob("full.*")))):
        want = torch.load(arguments.out / f"full.{step}")
        for kind in arguments.kinds:
            model, optimizer = trained(kind, 1000)
            sharded, moments = get_state_dict(model, optimizer)
            state: dict[str, Any] = {"model": sharded, "optimizer": moments}
            dcp.load(state, storage_reader=reader, checkpoint_id=str(step))
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            got = get_state_dict(model, optimizer, options=FULL)
            said = {
                "world": world,
                "step": step,
                "kind": kind,
                "equal": all(map(same, got, want)) if rank == 0 else True,
            }
            with (arguments.out / f"log.{rank}").open("a") as log:
                log.write(json.dumps(said) + "\n")
    writer.wait()
    writer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
