"""A small training, sharded in one of several ways; logs as tests/faults/train.py does, for the same machinery.

Each rank appends a line of JSON for all that happens to ``<out>/log.<rank>``. The full state of each step that is saved
goes to ``<out>/full.<step>``, and what is loaded is compared with it.
"""

import argparse
import gc
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastckpt._core.snapshot import mutation_check
from fastckpt.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer, StorageType

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.faults.diary import Log, digest, parser_of_all
from tests.faults.faults import inject_requested_faults

warnings.filterwarnings("ignore")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_all()
    parser.add_argument("--way", default="fsdp2", help="fsdp2, fsdp1, hsdp, tp, 2d, full or full1")
    parser.add_argument("--widen-at", type=int, default=10**9, help="from here on there is one more tensor")
    parser.add_argument("--text", type=int, default=0, help="characters by which a value grows in each step")
    parser.add_argument("--overlap", action="store_true", help="copy what the optimizer changes in the background")
    parser.add_argument("--wait", action="store_true", help="go on when a save to storage is durable")
    parser.add_argument("--resume-path", default="")
    parser.add_argument("--die", action="store_true", help="with the agent, after the last step")
    parser.add_argument("--full", action="store_true", help="keep the full states, and compare with them")
    return parser.parse_args()


def build(way: str) -> nn.Module:
    """Odd sizes: shards are padded, and some are empty."""
    torch.manual_seed(7)
    world = dist.get_world_size()
    model = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 5))
    if way in ("fsdp1", "full1"):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    if way == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
    if way == "2d":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shards", "tensors"))
    if way in ("tp", "2d"):
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(model, mesh["tensors"] if way == "2d" else mesh, plan)
    if way != "tp":
        data_mesh = mesh["shards"] if way == "2d" else mesh
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=data_mesh)
    return model


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state, which the first rank has. (torch's own way ends FSDP1 on a processor with a signal.)"""
    return _whole(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)))


def _whole(node: Any) -> Any:
    if isinstance(node, DTensor):
        return node.full_tensor().clone()
    if isinstance(node, ShardedTensor):
        out = torch.empty(node.size(), dtype=node.dtype) if dist.get_rank() == 0 else None
        node.gather(0, out, dtype=node.dtype)
        return out
    if isinstance(node, dict):
        return {name: _whole(child) for name, child in node.items()}
    return node.clone() if isinstance(node, torch.Tensor) else node


def collectives() -> int:
    """How many were made so far, in all groups."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    log, model = Log(args.out, rank), build(args.way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # ranks that share a tensor's parts take the same batch, and drop the same of it
    torch.manual_seed(11 + (0 if args.way == "tp" else rank // 2 if args.way == "2d" else rank))
    inject_requested_faults(rank, args.out)
    kind = FsdpFullCheckpointer if args.way in ("full", "full1") else FsdpShardCheckpointer
    if args.overlap:
        mutation_check.WORTH = 1  # the largest storage has 400 bytes
    checkpointer = kind(args.checkpoint_dir, overlap=optimizer if args.overlap else None)
    extra = checkpointer.load_checkpoint(model, optimizer, args.resume_path) or {
        "step": 0,
        "table": torch.zeros(100),
        "text": "",
    }
    step, table, text = extra["step"], extra["table"], extra["text"]
    assert step == max(0, checkpointer.loaded_step)
    # The agent of a node whose own workers did not fail does not count their restart.
    restarts = torch.tensor(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.all_reduce(restarts)
    start = [int(os.environ["FAULTS_LAUNCH"]), int(restarts)]
    said: dict[str, Any] = {"world": world}
    if args.full and step:
        full = full_state(model, optimizer)  # the first rank has it
        said["equal"] = rank > 0 or digest(full) == digest(torch.load(args.out / f"full.{step}"))
    log(loaded=step, tier=checkpointer.loaded_from, pid=os.getpid(), start=start, **said)
    pending = 0
    while step < args.steps:
        step += 1
        loss = model(torch.randn(4, 7)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        table += step
        text += "x" * args.text
        log(step=step, loss=loss.item().hex())
        if pending:
            log(saved=pending)
            pending = 0
        if step % args.memory == 0 or step % args.disk == 0:
            extra = {"step": step, "table": table, "text": text, "nested": [{"odd": [1, "b"]}, ("a", step)]}
            if step >= args.widen_at:
                extra["more"] = torch.ones(args.widen_at)
            place = StorageType.MEMORY if step % args.disk else StorageType.DISK
            before = collectives()
            result = checkpointer.save_checkpoint(
                step, storage_type=place, model=model, optimizer=optimizer, extra_sd=extra
            )
            spent = collectives() - before
            if result.pending:
                pending = step
                log(pending=step, collectives=spent)
            elif result.saved:
                log(saved=step, collectives=spent)
            else:
                log(skipped=step, reason=result.reason)
            if args.wait and place is StorageType.DISK:
                checkpointer.wait_latest_checkpoint()
            if args.full:
                full = full_state(model, optimizer)
                if rank == 0:
                    torch.save(full, args.out / f"full.{step}")
    dist.barrier()
    if args.die:
        if rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    full = full_state(model, optimizer)
    (args.out / f"end.{rank}").write_text(digest([full if rank == 0 else rank, table, text, torch.get_rng_state()]))
    checkpointer.close()


if __name__ == "__main__":
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    train(arguments)
    gc.collect()  # FSDP1 has cycles: gloo ends a process whose groups end late
    dist.barrier()
    dist.destroy_process_group()
