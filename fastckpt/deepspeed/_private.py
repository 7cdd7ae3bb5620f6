"""Private names of DeepSpeed; tried with DeepSpeed 0.19.8."""

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups


@contextmanager
def not_universal(engine: DeepSpeedEngine) -> Iterator[None]:
    """Within this, the engine loads checkpoints as its own, though it is configured for universal ones."""
    config = engine._config
    universal, config.load_universal_checkpoint = config.load_universal_checkpoint, False
    try:
        yield
    finally:
        config.load_universal_checkpoint = universal


def accumulated(engine: DeepSpeedEngine) -> int:
    """Micro-batches in the gradients that no step has used yet; 0 where their user sets the boundary."""
    if not engine.managed_gradient_accumulation():
        return int(engine._unmanaged_backward_count)
    if engine._is_gradient_accumulation_boundary is not None:
        return 0
    return int(engine.micro_steps % engine.gradient_accumulation_steps())


def model_files(engine: DeepSpeedEngine) -> list[str]:
    """Names of the files of the model, of all ranks that have a part of it."""
    return [engine._get_ckpt_name("", "", mp_placeholder=f"{rank:02d}") for rank in range(engine.mp_world_size)]


def partition_files(engine: DeepSpeedEngine) -> list[str]:
    """Names of the files of ZeRO that this rank reads: an elastic checkpoint is read whole by each rank."""
    if not engine.zero_elastic_checkpoint():
        return [engine._get_zero_ckpt_name("", "")]
    where = engine.checkpoint_mp_rank, engine.seq_dp_world_size, engine.bfloat16_enabled()
    return list(engine._get_mp_rank_zero_checkpoint_names("", "", *where))


def expert_files(engine: DeepSpeedEngine) -> Iterator[str]:
    """Names of the files of the experts that this rank has; without ZeRO, of the optimizer's part of them, too."""
    layers = (module for module in engine.module.modules() if isinstance(module, MoE))
    for number, layer in enumerate(layers):
        first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
        for expert in range(first, first + layer.num_local_experts):
            yield engine._get_expert_ckpt_name("", number, expert, "", checkpoint_mp_rank=engine.checkpoint_mp_rank)
    if not engine.zero_optimization():
        yield engine._get_optimizer_ckpt_name(
            "", "", groups._get_expert_parallel_rank(groups._get_max_expert_size_name())
        )


def early_change(optimizer: object) -> str:
    """A feature with which DeepSpeed may change states before the torch optimizer steps; empty for none."""
    return next((name for name in ("zenflow", "use_muon", "_uses_muon") if getattr(optimizer, name, False)), "")
