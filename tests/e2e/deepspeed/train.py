"""The training with DeepSpeed: a scheduler, a frozen layer, a buffer of each rank, and client state."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # as deepspeed.initialize does: forked workers have it already
import torch
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))
from fastckpt.deepspeed import DeepSpeedCheckpointer, SaveResult, StorageType
from tests.e2e.deepspeed import gloo  # noqa: F401 (for what it does)
from tests.faults import training
from tests.faults.training import Run, Training

BUCKET = 10_000
"""Numbers: more than the model has. DeepSpeed would fill buffers of a GB at each start, for MALLOC_PERTURB_."""

logger.setLevel("WARNING")


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


class DeepSpeed(Training):
    """All that DeepSpeed saves, and a table in the client state."""

    def __init__(self, run: Run) -> None:
        deepspeed.init_distributed("gloo", verbose=False)
        super().__init__(run)
        args, self.model = self.args, build()
        self._dtype = torch.bfloat16 if args.dtype.startswith("bf16") else torch.float32
        self.trained, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=[parameter for parameter in self.model.parameters() if parameter.requires_grad],
            config=config(args.stage, args.dtype, args.universal),
        )
        torch.manual_seed(11 + self.rank)
        self.checkpointer = DeepSpeedCheckpointer(self.trained, args.checkpoint_dir, overlap=args.overlap)

    def resume(self) -> int:
        _, client = self.checkpointer.load_checkpoint(self.args.checkpoint_dir)
        client = client or {"step": 0, "table": torch.zeros(100)}
        self._client = {name: client[name] for name in ("step", "table")}  # a universal one has more
        assert self._client["step"] == self.trained.global_steps
        return int(self._client["step"])

    def advance(self, step: int) -> torch.Tensor:
        loss: torch.Tensor = self.trained(torch.randn(4, 7).to(self._dtype)).float().square().mean()
        self.trained.backward(loss)
        self.trained.step()
        self._client = {"step": step, "table": self._client["table"] + step}
        return loss

    def save(self, step: int, place: StorageType) -> SaveResult:
        return self.checkpointer.save_checkpoint(
            self.args.checkpoint_dir, client_state=self._client, storage_type=place
        )

    def whole(self) -> Any:
        own = {} if self.args.full else dict(self.model.named_buffers())  # each rank has others
        return [weights(self.trained), self.trained.lr_scheduler.state_dict(), self._client, own]

    def close(self) -> None:
        self.checkpointer.close()
        self.trained.destroy()


if __name__ == "__main__":
    parser = training.parser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16, or bf16-fp32: with gradients in fp32")
    parser.add_argument("--universal", action="store_true", help="load what ds_to_universal made")
    training.main(DeepSpeed, parser.parse_args())
