"""A training under DDP that may offload its activations; logs as tests/faults/train.py does.

Each rank appends a line of JSON for all that happens to ``<out>/log.<rank>``, and at the end writes the digest of its
weights, optimizer and generator to ``<out>/end.<rank>``.
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
    parser.add_argument("--compare", action="store_true", help="compute each gradient without offloading as well")
    parser.add_argument("--settle", action="store_true", help="begin a backward when all is written that is to be")
    parser.add_argument("--offload", default="", metavar="DIR", help="{rank} stands for the rank")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    torch.manual_seed(7)
    log, model = Log(args.out, rank), DistributedDataParallel(nn.Sequential(*(layer() for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(11 + rank)
    inject_requested_faults(rank, args.out)
    offload = ActivationOffload(args.offload.format(rank=rank), budget="8MiB") if args.offload else None
    checkpointer, step, tier = DdpCheckpointer(args.checkpoint_dir), 0, ""
    if loaded := checkpointer.load_checkpoint():
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        step, tier = loaded["step"], checkpointer.loaded_from
    start = [int(os.environ["FAULTS_LAUNCH"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    log(loaded=step, tier=tier, pid=os.getpid(), start=start)

    def gradients(around: contextlib.AbstractContextManager | None) -> tuple[str, str]:
        """The loss of the step, and the digest of its gradients."""
        optimizer.zero_grad()
        with around or contextlib.nullcontext():
            loss = model(sequence() * (1 + 0.1 * step + rank)).square().mean()
        if args.settle and around:
            settled(around)
        loss.backward()
        return loss.item().hex(), digest([weight.grad for weight in model.parameters()])

    while step < args.steps:
        step += 1
        generator = torch.get_rng_state()
        plain = gradients(None) if args.compare else ("", "")
        torch.set_rng_state(generator)
        found = gradients(offload)
        assert found == plain or not args.compare, step
        optimizer.step()
        log(step=step, loss=found[0])
        if step % args.memory == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            result = checkpointer.save_checkpoint(step, state)
            log(**({"saved": step} if result.saved else {"skipped": step, "reason": result.reason}))
    dist.barrier()
    if offload:
        report = offload.report()
        assert report.failure or report.peak <= report.budget + (2 << 20), report
        log(written=report.written, read=report.read, planned=report.wrote.planned, failure=report.failure)
    # What a restarted process has not seen of gradients is in its weights and momentum.
    states = [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
    (args.out / f"end.{rank}").write_text(digest(states))
    checkpointer.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(parse_arguments())
    dist.barrier()
    dist.destroy_process_group()
