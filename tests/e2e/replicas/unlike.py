"""A training of which ranks have unlike parts: averages of BatchNorm, states of an optimizer, a replay buffer."""

import argparse
import os
import sys
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastckpt import Checkpointer

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.faults.diary import Log, digest, parser_of_all
from tests.faults.faults import inject_requested_faults

warnings.filterwarnings("ignore")  # broadcast_buffers has another name since torch 2.13


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


def train(args: argparse.Namespace) -> None:
    rank, log = dist.get_rank(), Log(args.out, dist.get_rank())
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 11), nn.BatchNorm1d(11), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 1))
    if args.way in ("fsdp2", "alone"):
        model: nn.Module = fully_shard(net) if args.way == "fsdp2" else net
    else:
        model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=args.way == "broadcast")
    optimizer = (OfShards if args.way in ("fsdp2", "alone") else Divided)(net.parameters())
    torch.manual_seed(11 + rank)
    inject_requested_faults(rank, args.out)
    replay, drifting = Replay(), Drifting()
    others = {"replay": replay, "drifting": drifting}
    every = {"memory": args.memory, "storage": args.disk}
    with Checkpointer(
        args.checkpoint_dir, model=model, optimizer=optimizer, others=others, every=every
    ) as checkpointer:
        step = checkpointer.resume()
        start = [int(os.environ[name]) for name in ("FAULTS_LAUNCH", "TORCHELASTIC_RESTART_COUNT")]
        log(loaded=step, tier=checkpointer._checkpointer.loaded_from, world=dist.get_world_size(), start=start)
        while step < args.steps and rank != args.leaves:
            step += 1
            replay.seen.append(torch.randn(4, 6) + rank)
            loss = model(torch.cat([*replay.seen])).square().mean() + drifting.value
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            drifting.value += rank if step > args.drifts else 0
            log(step=step, loss=loss.item().hex())
            if (result := checkpointer.step(step)) is not None:
                log(due=step, done=bool(result), unlike=[*checkpointer._differences.unlike])
    states = [optimizer.state[each] for each in net.parameters()]
    ends = [local(each) for each in net.state_dict().values()], states, replay.state_dict(), torch.get_rng_state()
    (args.out / f"end.{rank}").write_text(digest([*ends]))


if __name__ == "__main__":
    parser = parser_of_all()
    parser.set_defaults(steps=12, memory=1, disk=4)
    parser.add_argument("--way", default="ddp", help="ddp, broadcast, fsdp2, or alone")
    parser.add_argument("--drifts", type=int, default=1000, help="the step after which a part begins to differ")
    parser.add_argument("--leaves", type=int, default=-1, help="the rank that closes before its first step")
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.barrier()
    dist.destroy_process_group()
