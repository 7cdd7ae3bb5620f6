"""Engines whose checkpoints have files of layers and experts: saves one in a job of two ranks, and loads it again.

``layouts.py <kind> <checkpoint directory> <DeepSpeed's directory>``: each rank prints what it found.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import logger
from torch import nn

from fastckpt.deepspeed import DeepSpeedCheckpointer, reads

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.e2e.deepspeed import gloo  # noqa: F401 (for what it does)
from tests.e2e.deepspeed.engines import config

logger.setLevel("WARNING")


class First(nn.Module):
    def forward(self, found: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return found[0]


def experts() -> Any:
    torch.manual_seed(7)
    expert = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    model = nn.Sequential(nn.Linear(8, 8), MoE(8, expert=expert, num_experts=4, ep_size=2, k=1), First())
    parameters = {"params": [*model.parameters()], "name": "parameters"}
    groups = split_params_into_different_moe_groups_for_optimizer(parameters)
    settings = config(2, bf16={"enabled": True})
    return deepspeed.initialize(model=model, model_parameters=groups, config=settings)[0]


def pipeline() -> Any:
    torch.manual_seed(7)
    layers = [LayerSpec(nn.Linear, 8, 8), nn.functional.relu, LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 8)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    settings = config(1) | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    return deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=settings)[0]


def train(engine: Any, steps: int) -> list[float]:
    torch.manual_seed(20 + engine.global_steps)
    losses = []
    for _ in range(steps):
        batch = torch.randn(4, 8)
        if isinstance(engine.module, PipelineModule):
            losses.append(engine.train_batch(iter([(batch, batch), (batch, batch)])).item())
            continue
        loss = engine(batch.bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(kind: str, directory: str, theirs: str) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    make = {"experts": experts, "pipeline": pipeline}[kind]
    engine = make()
    with DeepSpeedCheckpointer(engine, directory) as one:
        train(engine, 2)
        assert one.save_checkpoint(directory, client_state={"epoch": 3})
        one.wait_latest_checkpoint()
        assert {*reads(engine)} <= {path.name for path in Path(directory, "global_step2").iterdir()}
        engine.save_checkpoint(theirs, client_state={"epoch": 3})
        expected = train(engine, 2)
        one._engine = again = make()
        path, client = one.load_checkpoint(directory)
        assert (again.global_steps, client["epoch"], one.loaded_from) == (2, 3, "memory"), path
        assert train(again, 2) == expected
    stock = make()
    stock.load_checkpoint(directory)
    assert train(stock, 2) == expected
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
