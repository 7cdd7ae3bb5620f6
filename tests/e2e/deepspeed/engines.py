"""Engines of DeepSpeed in this process, alone."""

from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger
from torch import nn

logger.setLevel("WARNING")
BATCH = torch.randn(4, 7, generator=torch.Generator().manual_seed(3))


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **more,
    }


def small() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.2), nn.Linear(13, 5))


def engine_of(model: nn.Module, settings: dict[str, Any], **options: Any) -> Any:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"model_parameters": parameters} | options
    return deepspeed.initialize(model=model, config=settings, **options)[0]


def train(engine: Any, steps: int = 1) -> float:
    for _ in range(steps):
        batch = BATCH.to(next(engine.module.parameters()).dtype)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
    return loss.item()
