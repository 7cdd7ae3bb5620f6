"""A small training with DeepSpeed; logs as tests/faults/train.py does, for the same machinery."""

import argparse
import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # as deepspeed.initialize does: forked workers have it already
import torch
import torch.distributed as dist
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))
from fastckpt._core.snapshot import mutation_check
from fastckpt.deepspeed import DeepSpeedCheckpointer, StorageType
from tests.e2e.deepspeed import gloo  # noqa: F401 (for what it does)
from tests.faults.diary import Log, digest, parser_of_all
from tests.faults.faults import inject_requested_faults

BUCKET = 10_000
"""Numbers: more than the model has. DeepSpeed would fill buffers of a GB at each start, for MALLOC_PERTURB_."""

warnings.filterwarnings("ignore")
logger.setLevel("WARNING")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_all()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16, or bf16-fp32: with gradients in fp32")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--universal", action="store_true", help="load what ds_to_universal made")
    return parser.parse_args()


def config(stage: int, dtype: str, universal: bool = False) -> dict[str, Any]:
    """Of DeepSpeed. The scheduler has the learning rate change in each step."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype.startswith("bf16")},
        "steps_per_print": 10**9,
        "checkpoint": {"load_universal": universal},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if dtype == "bf16-fp32" else {}),
    }


class Average(nn.Module):
    """Subtracts a moving average, of which each rank has its own; it is in the state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(size))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.lerp_(batch.detach().mean(0).to(self.average.dtype), 0.1)
        return batch - self.average.to(batch.dtype)


def build() -> nn.Module:
    """With a frozen layer, a buffer, and sizes that leave shards padded."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(7, 13), nn.GELU(), nn.Dropout(0.2), Average(13), nn.Linear(13, 13), nn.Linear(13, 5)
    )
    model[4].weight.requires_grad_(False)
    return model


def weights(engine: Any) -> dict[str, Any]:
    """All parameters in full, with their states in the optimizer."""
    found: dict[str, Any] = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # as after the first step
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
        if engine.zero_optimization() and parameter.requires_grad:
            found |= {
                f"{name} {key}": safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")
            }
            found[f"{name} fp32"] = safe_get_full_fp32_param(parameter)
    if not engine.zero_optimization():
        found["optimizer"] = engine.optimizer.state_dict()
    return found


def state(engine: Any, table: torch.Tensor) -> list[Any]:
    """What DeepSpeed saves."""
    return [weights(engine), engine.lr_scheduler.state_dict(), table]


def train(args: argparse.Namespace) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    log, model = Log(args.out, rank), build()
    dtype = torch.bfloat16 if args.dtype.startswith("bf16") else torch.float32
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=config(args.stage, args.dtype, args.universal),
    )
    torch.manual_seed(11 + rank)
    inject_requested_faults(rank, args.out)
    if args.overlap:
        mutation_check.WORTH = 1  # the largest storage has some 100 bytes
    checkpointer = DeepSpeedCheckpointer(engine, args.checkpoint_dir, overlap=args.overlap)
    _, client = checkpointer.load_checkpoint(args.checkpoint_dir)
    client = client or {"step": 0, "table": torch.zeros(100)}
    step, table = client["step"], client["table"]
    assert step == engine.global_steps
    start = [int(os.environ[name]) for name in ("FAULTS_LAUNCH", "TORCHELASTIC_RESTART_COUNT")]
    found = digest(state(engine, table)) if step else ""
    log(loaded=step, tier=checkpointer.loaded_from, pid=os.getpid(), start=start, world=world, state=found)
    pending = 0
    while step < args.steps:
        step += 1
        loss = engine(torch.randn(4, 7).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        table += step
        log(step=step, loss=loss.item().hex())
        if pending:
            log(saved=pending)
            pending = 0
        if step % args.memory == 0 or step % args.disk == 0:
            client = {"step": step, "table": table}
            place = StorageType.MEMORY if step % args.disk else StorageType.DISK
            result = checkpointer.save_checkpoint(args.checkpoint_dir, client_state=client, storage_type=place)
            if result.pending:
                pending = step
                log(pending=step)
            else:
                log(**({"saved": step} if result.saved else {"skipped": step, "reason": result.reason}))
    dist.barrier()
    end = [state(engine, table), dict(engine.module.named_buffers()), torch.get_rng_state()]
    (args.out / f"end.{rank}").write_text(digest(end))
    log(end=step, state=digest(end[0]))
    if rank == 0:
        torch.save(end[0][0], args.out / "weights")
    checkpointer.close()
    engine.destroy()


if __name__ == "__main__":
    train(parse_arguments())
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
