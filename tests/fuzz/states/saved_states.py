"""Ranks of a job save random states, equal on all or unlike in one entry of one rank, and load them again."""

import argparse
import copy
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fastckpt._core.native.folder_checkpointer import FolderCheckpointer, RequiredFiles, StorageType
from fastckpt._core.replicas.own_entries import entries
from fastckpt.dcp.reader import SharedMemoryReader
from fastckpt.dcp.writer import SharedMemoryWriter
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import ConfigError
from fastckpt.fsdp import FsdpShardCheckpointer
from fastckpt.lightning.saves import Saves

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.faults.diary import Log, digest, parser_of_all

warnings.filterwarnings("ignore")
State = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
FAR = 1000
"""Steps from one case to the next: each is compared."""
EQUAL = "equal"
CHANGES = ("value", "shape", "type", "absent", "more")


def leaf(chance: random.Random) -> Any:
    kind = chance.randrange(9)
    if kind < 5:
        dtype, shape = chance.choice(DTYPES), [chance.randint(0, 4) for _ in range(chance.randint(0, 3))]
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        whole = (torch.randn(shape, generator=generator) * 9).to(dtype)
        return whole.t() if whole.dim() == 2 and chance.random() < 0.5 else whole
    if kind == 5:
        return [leaf(chance) for _ in range(chance.randint(0, 3))]
    return chance.choice([chance.randrange(1 << 40), chance.random(), None, True, "text", "", (1, 2.5), float("nan")])


def node(chance: random.Random, depth: int = 0) -> State:
    made: State = OrderedDict() if chance.random() < 0.3 else {}
    for number in range(chance.randint(1, 4)):
        key = chance.choice([number, str(number), f"name{number}", f"a.b{number}"])
        made[key] = node(chance, depth + 1) if depth < 3 and chance.random() < 0.4 else leaf(chance)
    return made


def changed(state: State, chance: random.Random, change: str) -> str:
    """Change one entry of a state; what was done: another change, where that one cannot be."""
    name, path, found = chance.choice([*entries(state)])
    inside: Any = state
    for key in path[:-1]:
        inside = inside[key]
    key = path[-1]
    if change == "more":
        inside["another"] = torch.ones(3)
    elif change == "absent" and len(inside) > 1:
        del inside[key]
    elif isinstance(found, torch.Tensor) and found.numel() and change != "type":
        if change == "shape":
            inside[key] = torch.cat([found.reshape(-1), found.reshape(-1)])
        else:
            other = found.clone(memory_format=torch.contiguous_format)
            other.view(-1).view(torch.uint8)[chance.randrange(other.nbytes)] ^= 1
            inside[key] = other
            change = "value"
    else:
        inside[key] = "another" if found != "another" else 5
        change = "type"
    return change if change != "absent" or len(path) else name


def equal(one: Any, other: Any) -> bool:
    """Whether both are the same, bit for bit, and of the same types."""
    return digest([plain(one)]) == digest([plain(other)])


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {repr(key): plain(each) for key, each in sorted(value.items(), key=lambda item: repr(item[0]))}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return value if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value!r}"


def has(loaded: State, state: State) -> bool:
    """Whether all entries of a state were loaded as they were."""
    there = {name: each for name, _, each in entries(loaded)}
    return all(name in there and equal(there[name], each) for name, _, each in entries(state))


Try = Callable[[int, State, str], str]


def by_ddp(directory: Path, kind: type[DdpCheckpointer] = DdpCheckpointer) -> tuple[Any, Try]:
    checkpointer = kind(directory)
    checkpointer.load_checkpoint()

    def attempt(step: int, state: State, change: str) -> str:
        if isinstance(checkpointer, Saves):
            whole = {"global_step": step, "loops": {"fit_loop": {}}, **state}
            result = checkpointer.save(step, whole, "", StorageType.MEMORY)
        else:
            result = checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)
        assert result, result
        loaded = checkpointer.load_checkpoint()
        common = {name: each for name, each in loaded.items() if name not in ("global_step", "loops")}
        # Of DdpCheckpointer a rank that gives less has what the first one gave.
        is_own = has(common, state) if kind is DdpCheckpointer else equal(common, state)
        return "as it was" if is_own else "OTHER"

    return checkpointer, attempt


def by_shards(directory: Path) -> tuple[Any, Try]:
    checkpointer, model = FsdpShardCheckpointer(directory), nn.Linear(3, 2)

    def attempt(step: int, state: State, change: str) -> str:
        text = {str(key): each for key, each in state.items()}
        assert checkpointer.save_checkpoint(step, model, (), copy.deepcopy(text), storage_type=StorageType.DISK)
        loaded = checkpointer.load_checkpoint(model)
        # What another rank alone has is loaded, too: a state of shards is put together of all.
        return "as it was" if has(loaded, text) else "OTHER"

    return checkpointer, attempt


def by_dcp(directory: Path) -> tuple[Any, Try]:
    writer = SharedMemoryWriter(directory, storage_type=StorageType.MEMORY)

    def attempt(step: int, state: State, change: str) -> str:
        flat = {f"t {name}": each for name, _, each in entries(state) if torch.is_tensor(each)}
        flat["always"] = torch.zeros(2)
        writer._differences.begin()
        try:
            dcp.save(flat, storage_writer=writer, checkpoint_id=str(step))
        except dcp.api.CheckpointException as error:
            # ours, or that of DCP's own planner for shapes that are no one tensor's
            assert all(isinstance(each, ConfigError | AssertionError) for each, _ in error.failures.values()), error
            return "refused"
        into = {name: torch.zeros_like(each) for name, each in flat.items()}
        dcp.load(into, storage_reader=SharedMemoryReader(writer))
        return "as it was" if equal(into, flat) else "OTHER"

    return writer, attempt


def by_framework(directory: Path) -> tuple[Any, Try]:
    """The way of Trainer, accelerate and DeepSpeed, whose files one rank writes for all."""
    checkpointer = FolderCheckpointer(directory, RequiredFiles("model.bin", "model.bin"))

    def attempt(step: int, state: State, change: str) -> str:
        tensors = [each for _, _, each in entries(state) if torch.is_tensor(each) and each.is_floating_point()]
        model = nn.ParameterList([*map(nn.Parameter, tensors), nn.Parameter(torch.zeros(2))])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[model[-1]]["momentum_buffer"] = torch.ones(2) * len(tensors)
        checkpointer._differences.begin()
        try:
            checkpointer.compare(step, [model], [optimizer], StorageType.DISK)
        except ConfigError:
            return "refused"
        return "as it was"

    return checkpointer, attempt


WAYS = {
    "ddp": by_ddp,
    "lightning": lambda directory: by_ddp(directory, Saves),
    "shards": by_shards,
    "dcp": by_dcp,
    "framework": by_framework,
}


def main(args: argparse.Namespace) -> None:
    log = Log(args.out, dist.get_rank())
    log(loaded=0, tier="", start=[0, 0])
    for way, made in WAYS.items():
        checkpointer, attempt = made(Path(args.checkpoint_dir, way))
        try_all(way, attempt, args.steps, args.seed, log)
        checkpointer.close()


def try_all(way: str, attempt: Try, count: int, seed: int, log: Log) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in range(count):
        chance = random.Random(seed * 100_000 + case)
        state, change = node(chance), chance.choice((EQUAL, *CHANGES))
        other, odd = copy.deepcopy(state), chance.randrange(world)
        seen = EQUAL if change == EQUAL else changed(other, chance, change)
        same = {name: each for name, _, each in entries(state)}
        tensors = [
            name for name, _, each in entries(other) if torch.is_tensor(each) and not equal(each, same.get(name))
        ]
        came = attempt((case + 1) * FAR, other if rank == odd else state, seen)
        log(case=case, way=way, change=seen, tensors=len(tensors), came=came)


if __name__ == "__main__":
    parser = parser_of_all()
    parser.set_defaults(steps=24)
    parser.add_argument("--seed", type=int, default=1)
    dist.init_process_group("gloo")
    main(parser.parse_args())
    dist.barrier()
    dist.destroy_process_group()
