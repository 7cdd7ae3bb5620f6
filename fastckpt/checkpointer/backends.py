"""The checkpointer that a model needs: its types decide, and no other framework is imported."""

from typing import TYPE_CHECKING

from torch.nn import Module

from fastckpt.errors import ConfigError

if TYPE_CHECKING:
    from fastckpt.checkpointer.replicated_backend import ReplicatedBackend
    from fastckpt.checkpointer.sharded_backend import ShardedBackend

_SHARDED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch.distributed.fsdp.FSDPModule",
    "torch.distributed.tensor.DTensor",
}
"""Types of modules and parameters of which each rank has a part."""
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"


def backend_of(model: Module, *, staged: bool = False) -> "type[ReplicatedBackend] | type[ShardedBackend]":
    """The backend that saves training runs of this model; ``staged`` if ranks have stages of a pipeline.

    Raises ConfigError for an engine of DeepSpeed: it has its optimizer and scheduler in it, and divides their state.
    """
    things = {type(each) for each in model.modules()} | {type(each) for each in model.parameters()}
    names = {f"{base.__module__}.{base.__qualname__}" for each in things for base in each.__mro__}
    if _ENGINE in names:
        raise ConfigError(
            "model is a DeepSpeedEngine, which saves its optimizer and scheduler by itself: use "
            "fastckpt.deepspeed.DeepSpeedCheckpointer(engine, checkpoint_dir) instead of fastckpt.Checkpointer"
        )
    if staged or names & _SHARDED:
        from fastckpt.checkpointer.sharded_backend import ShardedBackend

        return ShardedBackend
    from fastckpt.checkpointer.replicated_backend import ReplicatedBackend

    return ReplicatedBackend
