"""A pipeline of torch.distributed.pipelining, FSDP2 within its two stages, with three lines for checkpoints.

Of the model each stage has two chunks, which are interleaved. Both stages have the same names and shapes. Logs as
tests/faults/train.py does; ``loss`` stands for what a rank has of the loss, and for its weights. The full state of a
stage after each save goes to ``<out>/full.<stage>.<step>``, and what is loaded is compared with it.
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from fastckpt import Checkpointer
from fastckpt._core.snapshot import mutation_check
from fastckpt.data import ResumableDataLoader

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.faults.diary import Log, digest, parser_of_all
from tests.faults.faults import inject_requested_faults
from tests.faults.programs.fsdp import full_state

warnings.filterwarnings("ignore")
STAGES, CHUNKS, BATCH, STORAGE = 2, 2, 8, 3


def chunk() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.LayerNorm(8), nn.Tanh())


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (STAGES, world // STAGES), mesh_dim_names=("stages", "data"))
    stage, replica, device = mesh.get_local_rank("stages"), mesh.get_local_rank("data"), torch.device("cpu")
    torch.manual_seed(7 + stage)
    model = nn.ModuleList(fully_shard(chunk(), mesh=mesh["data"]) for _ in range(CHUNKS))
    # the stages have other groups of parameters, so their schedulers have other states
    groups = [[p for p in model.parameters() if (p.dim() > 1) == (many or not stage)] for many in (True, False)]
    groups = [list(model.parameters())] if stage == 0 else groups
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], 0.5)
    loader = ResumableDataLoader(
        torch.randn(96, 8, generator=torch.Generator().manual_seed(5)),
        BATCH // mesh["data"].size(),
        shuffle=True,
        num_replicas=mesh["data"].size(),
        rank=replica,
    )
    group = mesh["stages"].get_group()
    stages = [
        PipelineStage(each, stage + STAGES * number, STAGES * CHUNKS, device, group=group)
        for number, each in enumerate(model)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 2, nn.functional.mse_loss)
    torch.manual_seed(11 + rank)
    mutation_check.WORTH = 1  # states copied in the background are small here
    log = Log(args.out, rank)
    inject_requested_faults(rank, args.out)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader, "stage": stage}
    with Checkpointer(args.checkpoint_dir, every={"memory": 1, "storage": STORAGE}, **parts) as checkpointer:
        step = checkpointer.resume()
        start = [int(os.environ[name]) for name in ("FAULTS_LAUNCH", "TORCHELASTIC_RESTART_COUNT")]
        full = [full_state(model, optimizer), scheduler.state_dict()]
        path = args.out / f"full.{stage}.{step}"
        equal = replica > 0 or not step or digest(full) == path.read_text()
        log(loaded=step, tier=checkpointer._checkpointer.loaded_from, world=world, equal=equal, start=start)
        for batch in loader:
            step += 1
            losses: list[torch.Tensor] = []
            schedule.step(*[batch] * (stage == 0), target=batch if stage == STAGES - 1 else None, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            full = [full_state(model, optimizer), scheduler.state_dict()]
            if replica == 0:
                (args.out / f"full.{stage}.{step}").write_text(digest(full))
            log(step=step, loss=digest([torch.stack(losses) if losses else 0, full]))
            if checkpointer.step(step) and args.stop_at and step % STORAGE == 0:
                checkpointer._checkpointer.wait_latest_checkpoint()
            log(due=step)
            if 0 < args.stop_at <= step:
                time.sleep(600)


if __name__ == "__main__":
    parser = parser_of_all()
    parser.add_argument("--stop-at", type=int, default=0, help="train up to here, then wait to be ended")
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.barrier()
    dist.destroy_process_group()
