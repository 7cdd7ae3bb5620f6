"""A training of which ranks have unlike parts: averages of BatchNorm, states of an optimizer, a replay buffer.

In the way ``equal`` they learn alike, and bits of one rank flip, as by a processor that is broken. At the end each rank
trains once more without checkpoints, and writes down what came of it.
"""

import argparse
import json
import os
import random
import sys
import warnings
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastckpt import Checkpointer
from fastckpt._core.native.folder_checkpointer import FolderCheckpointer, RequiredFiles
from fastckpt._core.replicas import rank_differences
from fastckpt.dcp.writer import SharedMemoryWriter
from fastckpt.ddp import settle
from fastckpt.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.faults.diary import Log, digest, parser_of_all
from tests.faults.faults import inject_requested_faults

warnings.filterwarnings("ignore")
rank_differences.SHARE = 1.0  # a comparison is due after as many steps in each run, however slow the machine is


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Divided(torch.optim.Optimizer):
    """Each rank has the momentum of its own parameters, as Muon; the others receive the weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for number, weight in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.mul_(0.9).add_(weight.grad)
                weight.sub_(momentum, alpha=self.param_groups[0]["lr"])
            dist.broadcast(weight, src=owner)


class OfShards(torch.optim.Optimizer):
    """Its states are plain tensors of this rank's own shards, as those of 8-bit optimizers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                gradient, state = local(weight.grad), self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros(gradient.numel(), dtype=torch.bfloat16))
                state.setdefault("largest", torch.zeros(()))
                momentum.copy_(momentum.float() * 0.9 + gradient.reshape(-1))
                state["largest"].copy_(torch.maximum(state["largest"], gradient.abs().sum()))
                local(weight).sub_(0.02 / (1 + state["largest"]) * momentum.view_as(gradient).float())


class Replay:
    """What a rank has seen last; empty at first."""

    def __init__(self) -> None:
        self.seen: deque[torch.Tensor] = deque(maxlen=3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [*self.seen], "rank": dist.get_rank() if self.seen else -1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.clear()
        self.seen.extend(state["seen"])


class Drifting:
    """Equal on all ranks up to a step."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Training:
    """A model with its optimizer and what else is saved; the same at every start."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.replay, self.drifting = args, Replay(), Drifting()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 11), nn.BatchNorm1d(11), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 1))
        if args.way == "fsdp2":
            self.model: nn.Module = fully_shard(self.net)
        else:
            self.model = nn.parallel.DistributedDataParallel(self.net, broadcast_buffers=args.way == "equal")
            settle(self.model, lambda: self.model(torch.ones(6, 6)).sum().backward())
        makes: dict[str, Any] = {"fsdp2": OfShards, "ddp": Divided, "equal": lambda of: torch.optim.AdamW(of, lr=0.01)}
        self.optimizer: torch.optim.Optimizer = makes[args.way](self.net.parameters())
        torch.manual_seed(11 + dist.get_rank())

    def parts(self) -> dict[str, Any]:
        others = {"replay": self.replay, "drifting": self.drifting}
        return {"model": self.model, "optimizer": self.optimizer, "others": others}

    def learn(self, step: int) -> str:
        self.replay.seen.append(torch.randn(4, 6) + dist.get_rank())
        loss = self.model(torch.cat([*self.replay.seen])).square().mean() + self.drifting.value
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.drifting.value += dist.get_rank() if step > self.args.drifts else 0
        return str(loss.item().hex())

    def flip(self, chance: random.Random) -> str:
        tensors = dict(self.net.named_parameters())
        for name, parameter in self.net.named_parameters():
            tensors |= {f"{name} {key}": value for key, value in self.optimizer.state[parameter].items()}
        name = chance.choice([name for name, each in tensors.items() if each.numel() > 1])
        numbers = tensors[name].detach().reshape(-1).view(torch.int32)
        # One of the least flips in vain: rounding makes it good again within some steps.
        at, bit = chance.randrange(len(numbers)), chance.randrange(16, 26)
        numbers[at] ^= 1 << bit
        return f"{name}[{at}] bit {bit}"

    def end(self) -> str:
        states = [self.optimizer.state[each] for each in self.net.parameters()]
        weights = [local(each) for each in self.net.state_dict().values()]
        return digest([weights, states, self.replay.state_dict(), torch.get_rng_state()])


def train(args: argparse.Namespace, log: Log) -> None:
    rank, training = dist.get_rank(), Training(args)
    inject_requested_faults(rank, args.out)
    every = {"memory": args.memory, "storage": args.disk}
    with Checkpointer(args.checkpoint_dir, **training.parts(), every=every) as checkpointer:
        step = checkpointer.resume()
        start = [int(os.environ[name]) for name in ("FAULTS_LAUNCH", "TORCHELASTIC_RESTART_COUNT")]
        log(loaded=step, tier=checkpointer._checkpointer.loaded_from, start=start)
        flip_at = step + [*args.flips, *[args.steps] * 9][start[1]]
        while step < args.steps:
            step += 1
            log(step=step, loss=training.learn(step))
            if rank == 1 and step == flip_at:
                log(flipped=training.flip(random.Random(1 + start[1])))
            if (result := checkpointer.step(step)) is not None:
                log(due=step, done=bool(result), unlike=[*checkpointer._differences.unlike])
    (args.out / f"end.{rank}").write_text(training.end())
    plain = Training(args)
    log(plain=[plain.learn(step) for step in range(1, args.steps + 1)], end=plain.end())


def leave_early(args: argparse.Namespace, log: Log) -> None:
    """The second rank closes before its first step."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(f"{args.checkpoint_dir}-alone", model=net, optimizer=optimizer, every=1) as checkpointer:
        checkpointer.resume()
        for step in (1, 2, 3) if dist.get_rank() == 0 else ():
            net(torch.ones(3)).sum().backward()
            optimizer.step()
            checkpointer.step(step)
            log(alone=step)


def by_dcp(folder: Path, *, unlike: bool) -> None:
    of_rank = {f"loader of {dist.get_rank()}": torch.ones(dist.get_rank() + 1)}
    state = {"weight": torch.ones(3) + (dist.get_rank() if unlike else 0), "note": dist.get_rank(), **of_rank}
    with closing(SharedMemoryWriter(folder)) as writer:
        try:
            dcp.save(state, storage_writer=writer, checkpoint_id="1")
        except dcp.api.CheckpointException as error:
            raise error.failures[dist.get_rank()][0] from error


def by_hsdp(folder: Path, *, unlike: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(nn.Linear(7, 5), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with Checkpointer(folder, model=model, optimizer=optimizer, every=1) as checkpointer:
        checkpointer.resume()
        model(torch.ones(4, 7)).square().mean().backward()
        optimizer.step()
        if unlike and dist.get_rank() == 1:
            model.weight._local_tensor.detach().add_(1.0)
        checkpointer.step(1)


def by_folder(folder: Path, *, unlike: bool) -> None:
    """As Accelerate, DeepSpeed and Trainer, which save an optimizer's state from one rank."""
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    optimizer = Divided(model.parameters()) if unlike else torch.optim.SGD(model.parameters(), momentum=0.9)
    with FolderCheckpointer(folder, RequiredFiles("model.pt", "model.pt")) as checkpointer:
        checkpointer.find()
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        checkpointer.compare(1, [model], [optimizer], None)


def try_others(folder: Path) -> None:
    """Save what ranks have equal, and what they have not and no file has a place for; write down the answers."""
    said: dict[str, str] = {}
    for way in (by_dcp, by_hsdp, by_folder):
        for unlike in (False, True):
            name = f"{way.__name__}, {'unlike' if unlike else 'equal'}"
            torch.manual_seed(5)
            try:
                said[name] = str(way(folder / name, unlike=unlike))
            except ConfigError as error:
                said[name] = str(error)
            dist.barrier()
    (folder / f"said.{dist.get_rank()}").write_text(json.dumps(said))


if __name__ == "__main__":
    parser = parser_of_all()
    parser.set_defaults(steps=12, memory=1, disk=4)
    parser.add_argument("--way", default="ddp", help="ddp, fsdp2, or equal")
    parser.add_argument("--apart", type=int, default=3, help="steps after a comparison in which there is no other")
    parser.add_argument("--drifts", type=int, default=1000, help="the step after which a part begins to differ")
    parser.add_argument("--flips", type=int, nargs="*", default=[], help="these steps of each start")
    arguments = parser.parse_args()
    rank_differences.EVERY = arguments.apart
    dist.init_process_group("gloo")
    diary = Log(arguments.out, dist.get_rank())
    train(arguments, diary)
    if arguments.way == "ddp":
        leave_early(arguments, diary)
    elif arguments.way == "fsdp2":
        try_others(arguments.out)
    dist.barrier()
    dist.destroy_process_group()
