"""Tensors of a DeepSpeed engine that only a step of its torch optimizer changes, or DeepSpeed right after it."""

from collections.abc import Iterator

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.optim import Optimizer

from fastckpt.deepspeed._private import early_change
from fastckpt.errors import ConfigError

_PARTITIONS = {
    DeepSpeedZeroOptimizer: "single_partition_of_fp32_groups",
    DeepSpeedZeroOptimizer_Stage3: "fp32_partitioned_groups_flat",
    BF16_Optimizer: "fp32_groups_flat_partition",
    FP16_Optimizer: "fp32_groups_flat",
    FP16_UnfusedOptimizer: "fp32_groups",
}
"""Attributes in which each optimizer has the weights of this rank that its torch optimizer steps on.

All of them look at gradients first, then have the torch optimizer step, which announces it, and then write to weights
in full or half precision. If gradients overflow they write to none.
"""


def steppers(engine: DeepSpeedEngine) -> list[Optimizer]:
    """The torch optimizers that alone change weights, by their steps; raises ConfigError if others do."""
    outer = engine.optimizer
    if isinstance(outer, Optimizer):
        return [outer]
    unlike = "" if type(outer) in _PARTITIONS else type(outer).__name__
    unlike = unlike or early_change(outer)
    if unlike:
        raise ConfigError(
            f"overlap is True, and the engine's optimizer has {unlike}: it may change states before its torch "
            "optimizer says that a step begins. Leave overlap out."
        )
    inner = [getattr(outer, name, None) for name in ("optimizer", "backup_optimizer")]
    return [each for each in inner if isinstance(each, Optimizer)]


def beside(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    """Weights that no torch optimizer has, or not between steps: in half precision, and partitions of this rank."""
    outer = engine.optimizer
    if type(outer) in _PARTITIONS:
        for group in getattr(outer, _PARTITIONS[type(outer)]):
            yield from [group] if isinstance(group, Tensor) else group
        yield from (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
