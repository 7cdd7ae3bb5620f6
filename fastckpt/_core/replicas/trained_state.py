"""Parameters, buffers and states of optimizers, as ranks have them in common where a framework saves them from one."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fastckpt._core.torch_private.tensors import compiled_module

State = dict[str, Any]


def trained_state(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> State:
    """The state of models and their optimizers, without a copy; empty where each rank has a part of its own.

    Left out are parts without replicas: shards of FSDP1 and of ZeRO, stages and slices of DeepSpeed, and experts.

    Args:
        models: Modules, wrapped or not, or engines of DeepSpeed.
        optimizers: torch's; those of other kinds are left out.
    """
    given = list(models)
    if any(map(_is_divided, given)):
        return {}
    bare = [unwrapped(getattr(model, "module", model) if _is_engine(model) else model) for model in given]
    prefixes = [f"{number}." if len(bare) > 1 else "" for number in range(len(bare))]
    named = {
        id(parameter): f"{prefix}{name}"
        for prefix, model in zip(prefixes, bare, strict=True)
        for name, parameter in model.named_parameters()
        if getattr(parameter, "allreduce", True)
    }
    tensors = {named[id(each)]: each for model in bare for each in model.parameters() if id(each) in named}
    buffers = {
        f"{prefix}{name}": buffer
        for prefix, model, wrapper in zip(prefixes, bare, given, strict=True)
        if not _is_engine(wrapper)  # DeepSpeedCheckpointer saves each rank's
        for name, buffer in model.named_buffers()
    }
    states = {
        f"{number}.{named[id(parameter)]}": dict(state)
        for number, optimizer in enumerate(optimizers)
        if isinstance(optimizer, Optimizer)
        for parameter, state in optimizer.state.items()
        if id(parameter) in named
    }
    return {"model": tensors | buffers, "optimizer": states}


def _is_divided(model: nn.Module) -> bool:
    """Return whether ranks have parts of a model, or of its parameters, that only their framework knows."""
    parts = getattr(model, "mp_world_size", 1) > 1 or hasattr(model, "is_first_stage")  # of DeepSpeed's engines
    return (
        parts
        or any(isinstance(each, FullyShardedDataParallel) for each in model.modules())
        or any(hasattr(each, "ds_id") for each in model.parameters())
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The module within wrappers that put something before the names of its state."""
    inner: Any = model
    while True:
        if isinstance(inner, DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        elif (compiled := compiled_module(inner)) is not None:
            inner = compiled
        else:
            return inner  # type: ignore[no-any-return]


def _is_engine(model: nn.Module) -> bool:
    return hasattr(model, "zero_optimization_stage")  # of DeepSpeed
