"""Two ranks that ask for what cannot be saved in shared memory, then for what can, at last after one of them failed."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fastckpt.dcp import SharedMemoryReader, SharedMemoryWriter
from fastckpt.errors import ConfigError


class Failing(DefaultSavePlanner):
    """Has no data."""

    def resolve_data(self, write_item: Any) -> Any:
        raise RuntimeError("no data")


def made_again(writer: SharedMemoryWriter, step: int, victim: int) -> str:
    """Save a step in which one rank fails when the other has its part in memory, then the same step of other values."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()

    def state(value: int) -> dict[str, Any]:
        return {"w": DTensor.from_local(torch.full((5,), value), mesh, [Shard(0)]), "text": str(value)}

    for value, planner in ((1, Failing() if rank == victim else None), (2, None)):
        try:
            dcp.save(state(value), storage_writer=writer, checkpoint_id=str(step), planner=planner)
        except CheckpointException as error:
            assert value == 1 and "no data" in str(error)
    assert writer.result, writer.result
    loaded, reader = state(0), SharedMemoryReader(writer)
    dcp.load(loaded, storage_reader=reader)
    equal = torch.equal(loaded["w"].full_tensor(), torch.full((10,), 2)) and loaded["text"] == "2"
    return "all of the second" if equal and reader.loaded_step == step else f"{loaded} of {reader.loaded_step}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    writer = SharedMemoryWriter(arguments.out / "checkpoints")
    asked: dict[str, dict[str, Any]] = {
        "no_dist": {"no_dist": True},
        "use_collectives": {"use_collectives": False},
        "process_group": {"process_group": groups[rank]},
        "nothing": {},
    }
    said = {}
    for name, options in asked.items():
        try:
            dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="1", **options)
            said[name] = "saved" if writer.result else "skipped"
        except (ConfigError, CheckpointException) as error:
            said[name] = "all ranks of the job" if "all ranks of the job" in str(error) else str(error)[-80:]
        dist.barrier()
    for victim in range(dist.get_world_size()):
        said[f"after rank {victim}"] = made_again(writer, 10 + victim, victim)
    (arguments.out / f"log.{rank}").write_text(json.dumps(said) + "\n")
    writer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
