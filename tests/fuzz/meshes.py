"""Random sharded models, saved and loaded by fastckpt and by stock DCP: what stock brings back alike, all bring back.

For each seed a model is made, trained and saved by both; another one, perhaps in another sharding, is given each of the
two checkpoints by each of the two. Run by torchrun or fastckpt-run on four ranks; prints a line of JSON for each seed.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastckpt.fsdp import FsdpShardCheckpointer, StorageType

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults.diary import digest
from tests.faults.programs.fsdp import full_state

warnings.filterwarnings("ignore")
WAYS = ("fsdp2", "fsdp2", "hsdp", "tp", "2d", "fsdp1", "stages")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    torch.optim.AdamW,
    partial(torch.optim.AdamW, amsgrad=True),
    torch.optim.SGD,
    partial(torch.optim.SGD, momentum=0.9),
    partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.Adamax,
)


class Odd(nn.Module):
    """Has what is no weight: an integer buffer, one that is not saved, a state of its own; perhaps an unused weight."""

    def __init__(self, width: int, *, unused: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.unused = nn.Linear(width, 2) if unused else None
        self.scale, self.seen = nn.Parameter(torch.ones(1)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen += 1
        return x * self.scale

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "norm": nn.LayerNorm,
    "batch": nn.BatchNorm1d,
    "odd": Odd,
    "unused": partial(Odd, unused=True),
}


class Case:
    """A model and its training, as a seed has it."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.ways = draw.choice(WAYS), draw.choice(WAYS)
        if draw.random() < 0.6 or "stages" in self.ways:
            self.ways = self.ways[0], self.ways[0]
        self.widths = [draw.randint(1, 12) for _ in range(draw.randint(2, 5))]
        self.kinds = [
            draw.choice(("none", "none", "none", "norm", "norm", "batch", "odd", "odd", "unused")) for _ in self.widths
        ]
        self.biases = [draw.random() < 0.8 for _ in self.widths]
        self.frozen = {i for i in range(len(self.widths)) if draw.random() < 0.2} - {0}
        self.units = {i for i in range(len(self.widths)) if draw.random() < 0.5}
        self.columns, self.dtype = draw.random() < 0.3, draw.choice(DTYPES)
        self.optimizer, self.groups = draw.choice(OPTIMIZERS), draw.randint(1, 3)
        self.several = draw.random() < 0.15 and "fsdp1" not in self.ways
        self.steps, self.before = draw.randint(1, 3), draw.randint(0, 1)
        self.place = draw.choice((StorageType.MEMORY, StorageType.DISK))

    @property
    def stage(self) -> int | None:
        return dist.get_rank() // 2 if "stages" in self.ways else None

    def build(self, number: int, seed: int) -> "Job":
        torch.manual_seed(seed + (self.stage or 0))
        layers: list[nn.Module] = []
        for i, width in enumerate(self.widths):
            parts: list[nn.Module] = [nn.Linear(self.widths[i - 1], width, bias=self.biases[i]), nn.Tanh()]
            parts += [KINDS[self.kinds[i]](width)] if self.kinds[i] != "none" else []
            layers.append(nn.Sequential(*parts))
            layers[-1][0].requires_grad_(i not in self.frozen)
        model = nn.Sequential(*layers).to(self.dtype)
        return Job(self, self._sharded(model, self.ways[number]))

    def _plan(self, ranks: int) -> dict[str, Any]:
        """Of tensor parallelism; torch may hang in the training of what it cannot part evenly."""
        plan: dict[str, Any] = {}
        for i in self.units:
            if i % 2 and self.widths[i] % ranks == 0:
                plan[f"{i}.0"] = ColwiseParallel(output_layouts=Replicate())
            elif not i % 2 and self.widths[i - 1] % ranks == 0:
                plan[f"{i}.0"] = RowwiseParallel(input_layouts=Replicate())
        return plan

    def _sharded(self, model: nn.Sequential, way: str) -> nn.Module:
        if way == "fsdp1":
            kept: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
            for i in self.units:
                model[i] = FullyShardedDataParallel(model[i], **kept)
            return FullyShardedDataParallel(model, **kept)
        shape = (4,) if way == "fsdp2" or way == "tp" else (2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("first", "second")[: len(shape)])
        if way in ("tp", "2d"):
            tensors = mesh["second"] if way == "2d" else mesh
            parallelize_module(model, tensors, self._plan(tensors.size()))
        if way != "tp":
            of = {"hsdp": mesh, "fsdp2": mesh}.get(way, mesh["second"] if way == "stages" else mesh["first"])
            chosen = _last_dimension if self.columns and way == "fsdp2" else None
            for i in self.units:
                fully_shard(model[i], mesh=of, shard_placement_fn=chosen)
            fully_shard(model, mesh=of, shard_placement_fn=chosen)
        return model


def _last_dimension(parameter: nn.Parameter) -> Shard:
    """FSDP2 parts evenly what it parts in another dimension than the first."""
    return Shard(parameter.dim() - 1 if parameter.size(-1) % dist.get_world_size() == 0 else 0)


class Job:
    """A model with its optimizers."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case, self.model = case, model
        parameters = [each for each in model.parameters() if each.requires_grad]
        count = min(case.groups, len(parameters))
        groups = [{"params": parameters[i::count], "lr": 0.01 * (i + 1)} for i in range(count)]
        parted = [[group] for group in groups] if case.several else [groups]
        self.optimizers = [case.optimizer(each) for each in parted]

    def train(self, steps: int, since: int = 0) -> "Job":
        for step in range(since, since + steps):
            inputs = torch.randn(4, self.case.widths[-1], generator=torch.Generator().manual_seed(step))
            self.model(inputs.to(self.case.dtype)).square().mean().backward()
            for each in self.optimizers:
                each.step()
                each.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizers), strict=True))

    def digest(self) -> str:
        """Of the whole state, on the ranks that have it."""
        full = full_state(self.model, self.optimizers)  # type: ignore[arg-type]
        return digest(full) if "fsdp1" not in self.case.ways or dist.get_rank() == 0 else ""


def by_stock(path: Path, job: Job) -> None:
    state = job.state()
    dcp.load(state, checkpoint_id=path)
    model, optimizer = state["model"], state["optimizer"]
    set_state_dict(job.model, job.optimizers, model_state_dict=model, optim_state_dict=optimizer)


def by_ours(checkpointer: FsdpShardCheckpointer, path: str, job: Job) -> None:
    checkpointer.load_checkpoint(job.model, job.optimizers, path)


def outcome(case: Case, load: Callable[[Job], None], wanted: list[str]) -> str:
    """What became of a load, in the worst of the ranks: "alike", "unlike" or an error."""
    try:
        job = case.build(1, seed=100).train(case.before, since=50)
        load(job)
        found = [job.digest()]
        if case.ways[0] == case.ways[1]:
            found.append(job.train(2, since=case.steps).digest())
        said = "alike" if found == wanted[: len(found)] else "unlike"
    except (Exception, CheckpointException) as error:  # whatever it is, it is what became of it
        said = f"{type(error).__name__}: {str(error)[-300:]}"
    ranks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(ranks, said)
    return next((each for each in ranks if each != "alike"), "alike")


def run(seed: int, folder: Path) -> dict[str, str]:
    case = Case(seed)
    try:
        job = case.build(0, seed=1).train(case.steps)
    except RuntimeError as error:  # there is nothing to save: torch has no such operator on such shards
        return {"ways": " to ".join(case.ways), "stock": f"no training: {error}"}
    ours, theirs = folder / f"{seed}-ours", folder / f"{seed}-stock"
    with contextlib.closing(FsdpShardCheckpointer(ours, stage=case.stage)) as checkpointer:
        checkpointer.load_checkpoint(job.model, job.optimizers)
        saved = checkpointer.save_checkpoint(1, job.model, job.optimizers, storage_type=case.place)
        assert saved, saved.reason
        if case.place is StorageType.DISK:
            checkpointer.wait_latest_checkpoint()
        dcp.save(job.state(), checkpoint_id=theirs)
        wanted = [job.digest(), job.train(2, since=case.steps).digest()]
        said = {"stock": outcome(case, partial(by_stock, theirs), wanted)}
        said["ours"] = outcome(case, partial(by_ours, checkpointer, ""), wanted)
        if case.stage is None:
            said["ours of stock's"] = outcome(case, partial(by_ours, checkpointer, str(theirs)), wanted)
    dist.barrier()
    if case.stage is None and case.place is StorageType.DISK:
        said["stock of ours"] = outcome(case, partial(by_stock, ours / "checkpoint-1"), wanted)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(theirs)
    return {"ways": " to ".join(case.ways), **said}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("seeds", type=int, nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for seed in args.seeds:
        said = run(seed, args.folder)
        if dist.get_rank() == 0:
            with (args.folder / "said").open("a") as file:
                print(json.dumps({"seed": seed, **said}), file=file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
