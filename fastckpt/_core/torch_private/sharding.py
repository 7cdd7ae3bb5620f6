"""Private names of FSDP, DTensor and torch.distributed.checkpoint, and the differences between releases of torch."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor import metadata as earlier
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_leaves

from fastckpt.errors import FastckptError

__all__ = [
    "EXTRA_STATE",
    "PICKLED_ENUMS",
    "PICKLED_PROPERTIES",
    "ShardedTensor",
    "StorageInfo",
    "asks_rank_0",
    "flat_parameters",
    "flatten_sharded_tensors",
    "flatten_state_dict",
    "group_of",
    "layout_of",
    "narrow_tensor_by_index",
    "reduces_gradients",
    "saying_why",
    "set_element",
    "spec_of",
    "tree_leaves",
]

Arguments = ParamSpec("Arguments")
EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX
"""The ending of the name of a module's extra state."""
PICKLED_ENUMS = metadata._MEM_FORMAT_ENCODING, earlier.MEM_FORMAT_ENCODING
PICKLED_PROPERTIES = metadata.TensorProperties, earlier.TensorProperties
"""Classes in DCP's pickles, as torch writes them now, and did before 2.3."""
layout_of = torch.serialization._get_layout
"""The layout of this name; pickles of DCP call it."""
StorageInfo = _StorageInfo
"""The place of an item in DCP's files: file, offset, length."""
flatten_sharded_tensors = _flatten_sharded_tensors
"""The same state dict with the one shard that this rank has in place of each ShardedTensor."""
_OF_TWO_GROUPS = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


def spec_of(tensor: DTensor) -> Any:
    """The layout of a DTensor on its mesh."""
    return tensor._spec


def group_of(tensor: ShardedTensor) -> Any:
    """The process group of the ranks with the shards."""
    return tensor._process_group


def reduces_gradients(module: FSDPModule) -> bool:
    """Return whether FSDP2 reduces this module's gradients after its backward; it does, unless switched off.

    In torch 2.10 a module has one group of parameters, or None; later it has any number.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = filter(None, [state._fsdp_param_group])
    return all(group.reduce_grads for group in groups)


def flat_parameters(model: Module) -> list[tuple[str, tuple[int], tuple[int, ...], torch.Tensor]]:
    """The flat parameters of FSDP1: name, index of this rank's part, the ranks that share it, that part."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and (handle := module._handle) is not None:
            ranks, flat = dist.get_process_group_ranks(handle.process_group), handle.flat_param
            part = ranks.index(dist.get_rank()) if handle.uses_sharded_strategy else 0
            first = ".".join(filter(None, (name, flat._fqns[0]))).replace("_fsdp_wrapped_module.", "")
            # FSDP1 may have gathered the whole parameter between a forward and a backward: take the shard
            found.append((first, (part,), tuple(ranks), getattr(flat, "_local_shard", flat)))
    return found


def asks_rank_0(model: Module) -> bool:
    """Return whether torch would ask global rank 0, in a group without it, which parameters of FSDP1 have states.

    It does so for optimizers of flat parameters, in all ranks of the group that shards the model.
    """
    modules = FullyShardedDataParallel.fsdp_modules(model)
    if not modules or modules[0]._use_orig_params or modules[0].sharding_strategy in _OF_TWO_GROUPS:
        return False
    return dist.get_world_size(modules[0].process_group) < dist.get_world_size()


def saying_why(read: Callable[Arguments, Metadata]) -> Callable[Arguments, Metadata]:
    """A reader's ``read_metadata``; its error reaches the caller of ``dcp.load``.

    torch before 2.12 drops it and reports only that metadata is None, so it is raised at the first use of them instead.
    """
    if torch.__version__ >= (2, 12):  # type: ignore[operator]
        return read

    @wraps(read)
    def reading(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Metadata:
        try:
            return read(*args, **kwargs)
        except (FastckptError, OSError, RuntimeError) as error:
            return _Unread(error)

    return reading


class _Unread(Metadata):
    """The stand-in for metadata that could not be read: raises the error at the first use."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "storage_data", "planner_data"):
            raise self._error
        return super().__getattribute__(name)
