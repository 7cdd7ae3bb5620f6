"""FSDP2 program that saves with dcp.save, logs each resume, and keeps the full tensors of each step."""

import argparse
import json
import os
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastckpt._core import metrics
from fastckpt.dcp import SharedMemoryReader, SharedMemoryStager, SharedMemoryWriter, StorageType
from tests.e2e.dcp.states import same


class App:
    """All that is saved: sharded parameters and moments, a tensor that all ranks have, and a text that grows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)]  # odd sizes: shards are padded, and some are empty
        for layer in layers:
            fully_shard(layer)
        self.model = torch.nn.Sequential(*layers)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.table = torch.zeros(1000)
        self.text = ""

    def train(self, step: int) -> None:
        torch.manual_seed(step)
        self.model(torch.randn(4, 7)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.table += step
        self.text += "x" * 100

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "table": self.table, "text": self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.text = state["text"]

    def full(self) -> dict[str, Any]:
        return _full(self.state_dict())


def _full(node: Any) -> Any:
    if isinstance(node, DTensor):
        return node.full_tensor().clone()
    if isinstance(node, torch.Tensor):
        return node.clone()
    return {key: _full(value) for key, value in node.items()} if isinstance(node, dict) else node


def die_at(place: str) -> None:
    """End this process in a phase of the save of a step: ``phase:step``, or ``phase:step:n`` in the n-th such phase."""
    phase, step, *nth = place.split(":")
    left = int(nth[0]) if nth else 1

    def see(name: str, fields: dict[str, Any]) -> None:
        nonlocal left
        if (name, fields.get("step")) == (phase, int(step)):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    metrics.observe(see)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--until", type=int)
    parser.add_argument("--memory", type=int, nargs="*", default=[], help="steps to save in memory only")
    parser.add_argument("--die", default="", help="where a rank dies, once, such as 1:snapshot.fill:3")
    parser.add_argument("--also", type=int, default=0, help="a step to load besides")
    parser.add_argument("--behind", action="store_true", help="save as torchtitan does, with async_save and our stager")
    parser.add_argument("--lose-agent", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    directory, app = arguments.out / "checkpoints", App()
    writer = SharedMemoryWriter(directory)
    reader, stager = SharedMemoryReader(writer), SharedMemoryStager(writer)
    group = dist.new_group(backend="gloo") if arguments.behind else None
    saving: Future[Any] | None = None

    def load(**options: Any) -> None:
        dcp.load({"app": app}, storage_reader=reader, **options)
        full, step = app.full(), reader.loaded_step
        said = {"world": world, "loaded": step, "tier": reader.loaded_from}
        said["equal"] = same(full, torch.load(arguments.out / f"full.{step}"))
        with (arguments.out / f"log.{rank}").open("a") as log:
            log.write(json.dumps(said) + "\n")

    if arguments.also:
        load(checkpoint_id=str(arguments.also))
    victim, _, place = arguments.die.partition(":")
    if victim == str(rank) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die_at(place)
    start = reader.find() or 0
    if start:
        load()
    for step in range(start + 1, arguments.until + 1):
        app.train(step)
        full = app.full()
        if saving is not None:
            saving.result()
            assert writer.result, writer.result
        if rank == 0:
            torch.save(full, arguments.out / f"full.{step}")
        writer.storage_type = StorageType.MEMORY if step in arguments.memory else StorageType.DISK
        if arguments.behind:
            saving = dcp.async_save(
                {"app": app}, storage_writer=writer, async_stager=stager, process_group=group,
                checkpoint_id=f"{directory}/step-{step}",
            )  # fmt: skip
        else:
            dcp.save({"app": app}, storage_writer=writer, checkpoint_id=f"{directory}/checkpoint-{step}")
            assert writer.result, writer.result
    if saving is not None:
        saving.result()
    if arguments.lose_agent:
        writer.wait()
        dist.barrier()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    writer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
