"""What differs between the releases of torch that this library works with, beside its public names."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import FSDPModule

from fastckpt.errors import FastckptError

Arguments = ParamSpec("Arguments")


def reduces_gradients(module: FSDPModule) -> bool:
    """Whether FSDP2 reduces the gradients of this module after its backward; it does, unless told not to.

    In torch 2.10 a module has one group of parameters, or None; later it has any number.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = filter(None, [state._fsdp_param_group])
    return all(group.reduce_grads for group in groups)


def saying_why(read: Callable[Arguments, Metadata]) -> Callable[Arguments, Metadata]:
    """A reader's ``read_metadata`` whose error reaches the caller of ``dcp.load``.

    torch before 2.12 drops it, and says only that metadata are None: it is raised when they are first used instead.
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
    """In the place of metadata that could not be read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "storage_data", "planner_data"):
            raise self._error
        return super().__getattribute__(name)
