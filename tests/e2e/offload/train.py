"""A training under DDP or FSDP that may offload its activations; logs as tests/faults/train.py does.

Each rank appends a line of JSON for all that happens to ``<out>/log.<rank>``, and at the end writes the digest of its
weights, optimizer, generator and of all gradients since its start to ``<out>/end.<rank>``.
"""

import argparse
import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastckpt.ddp import DdpCheckpointer
from fastckpt.offload import ActivationOffload

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.e2e.offload.losses import settled
from tests.e2e.offload.models import layer, sequence
from tests.faults.diary import Log, digest, parser_of_all
from tests.faults.faults import inject_requested_faults

warnings.filterwarnings("ignore")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_all()
    parser.add_argument("--settle", action="store_true", help="begin a backward when all is written that is to be")
    parser.add_argument("--way", default="ddp", help="ddp or fsdp2")
    parser.add_argument("--offload", default="", metavar="DIR", help="{rank} stands for the rank")
    parser.add_argument("--unclosed", action="store_true", help="leave the checkpointer as it is")
    return parser.parse_args()


def build(way: str) -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(*(layer() for _ in range(3)))
    if way == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*model, model):
        fully_shard(each, mesh=mesh)
    return model


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    log, model = Log(args.out, rank), build(args.way)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(11 + rank)
    inject_requested_faults(rank, args.out)
    offload = ActivationOffload(args.offload.format(rank=rank), budget="8MiB") if args.offload else None
    checkpointer = DdpCheckpointer(args.checkpoint_dir) if args.way == "ddp" else None
    step, tier = 0, ""
    if checkpointer and (loaded := checkpointer.load_checkpoint()):
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        step, tier = loaded["step"], checkpointer.loaded_from
    start = [int(os.environ["FAULTS_LAUNCH"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    log(loaded=step, tier=tier, pid=os.getpid(), start=start)
    gradients = ""
    while step < args.steps:
        step += 1
        with offload or contextlib.nullcontext():
            loss = model(sequence() * (1 + 0.1 * step + rank)).square().mean()
        if args.settle and offload:
            settled(offload)
        loss.backward()
        gradients = digest([gradients, *(each.to_local() if args.way == "fsdp2" else each for each in grads(model))])
        optimizer.step()
        optimizer.zero_grad()
        log(step=step, loss=loss.item().hex())
        if checkpointer and step % args.memory == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            result = checkpointer.save_checkpoint(step, state)
            log(**({"saved": step} if result.saved else {"skipped": step, "reason": result.reason}))
    dist.barrier()
    if offload:
        report = offload.report()
        assert report.failure or report.peak <= report.budget + (2 << 20), report
        log(written=report.written, read=report.read, planned=report.wrote.planned, failure=report.failure)
        log(forwards=report.forwards)
    # What a restarted process has not seen of gradients is in its weights and momentum.
    states = [local(model.state_dict()), local(optimizer.state_dict()), torch.get_rng_state()]
    (args.out / f"end.{rank}").write_text(digest(states))
    (args.out / f"gradients.{rank}").write_text(gradients)
    if checkpointer and not args.unclosed:
        checkpointer.close()


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def local(state: object) -> object:
    """The same with the local parts of tensors."""
    if isinstance(state, dict):
        return {name: local(value) for name, value in state.items()}
    if isinstance(state, list):
        return [local(value) for value in state]
    return state.to_local() if hasattr(state, "to_local") else state


def main() -> None:
    dist.init_process_group("gloo")
    train(parse_arguments())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
