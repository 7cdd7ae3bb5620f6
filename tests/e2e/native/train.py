"""A small training whose checkpoints have a layout of its own; logs as tests/faults/train.py does.

Each rank appends a line of JSON for all that happens to ``<out>/log.<rank>``.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fastckpt._core.native.folder_checkpointer import (
    CheckpointNames,
    FolderCheckpointer,
    Raw,
    RequiredFiles,
    StorageType,
    Tensors,
)
from fastckpt._core.snapshot.rng_state import restore_rng, rng_state

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.faults.diary import Log, parser_of_all
from tests.faults.faults import inject_requested_faults

MODEL, STATE, OPTIMIZER = "model.safetensors", "state.json", "optimizer/first.pt"


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_all()
    parser.add_argument("--wait", action="store_true", help="go on when a save to storage is durable")
    parser.add_argument("--tags", action="store_true", help="call directories as the framework would")
    parser.add_argument("--split", action="store_true", help="the first rank alone saves the optimizer")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rank = dist.get_rank()
    log = Log(args.out, rank)
    inject_requested_faults(rank, args.out)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(11 + rank)
    own = f"random/{rank}.pt"
    checkpointer = FolderCheckpointer(
        args.checkpoint_dir, RequiredFiles(STATE, own, (OPTIMIZER,) if args.split else ())
    )
    step, history = 0, []
    found = checkpointer.find()
    if found is not None:
        with found:
            model.load_state_dict(load_file(found.path / MODEL))
            optimizer.load_state_dict(torch.load(found.path / OPTIMIZER))
            restore_rng(torch.load(found.path / own))
            history = json.loads((found.path / STATE).read_text())
            step = len(history)
            assert step == found.step
    restarts = torch.tensor(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.all_reduce(restarts)
    log(
        loaded=step, tier=found.tier if found else "", pid=os.getpid(),
        start=[int(os.environ["FAULTS_LAUNCH"]), int(restarts)],
    )  # fmt: skip
    while step < args.steps:
        step += 1
        loss = model(torch.randn(4, 7)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item().hex())
        log(step=step, loss=loss.item().hex())
        if step % args.memory == 0 or step % args.disk == 0:
            files: dict[str, Any] = {own: rng_state()}
            common = {
                MODEL: Tensors(model.state_dict(), {"format": "pt"}),
                STATE: Raw(json.dumps(["0" * 30] * step).encode(), may_end_with_spaces=True),
                OPTIMIZER: optimizer.state_dict(),
            }
            if args.split:
                alone = {OPTIMIZER: common.pop(OPTIMIZER)}
                files |= alone if rank == 0 else {}
            files |= common if checkpointer.writes_common else {}
            kind = StorageType.MEMORY if step % args.disk else StorageType.DISK
            named = CheckpointNames(f"global_step{step}", "latest") if args.tags else CheckpointNames()
            result = checkpointer.save_checkpoint(step, files, kind, common=common, named=named)
            if args.wait and kind is StorageType.DISK:
                checkpointer.wait_latest_checkpoint()
            log(saved=step) if result else log(skipped=step, reason=result.reason)
    dist.barrier()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    end = hashlib.sha256(weights + torch.get_rng_state().numpy().tobytes()).hexdigest()
    (args.out / f"end.{rank}").write_text(end)
    checkpointer.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
