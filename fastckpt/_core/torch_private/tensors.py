"""Private names of tensors, storages, autograd, optimizers and process groups."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo.guards import TensorGuards
from torch.autograd.graph import _engine_run_backward
from torch.storage import _share_memory_lock, _share_memory_map

if TYPE_CHECKING:
    from torch.optim import Optimizer

_Hook = TypeVar("_Hook", bound=Callable[..., Any])

storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The identity of a storage: all Python objects of one storage share it."""
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""The version counter of a tensor: each operation that writes to it raises the counter, once it has written."""
share_memory_lock, share_memory_map = _share_memory_lock, _share_memory_map
"""The lock that a thread takes to move a storage to shared memory, and the map of locks of storages being moved."""
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The tensor that a tensor is a view of, for autograd; None for others."""
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that autograd gives to the next node that this thread makes: equal for all that one node saves."""
has_no_memory: Callable[[torch.Tensor], bool] = torch._C.TensorBase._is_zerotensor
"""Return whether a tensor is one of zeros without memory: its address is 0, whatever its size."""
_proxy_mode: Callable[[], object | None] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
copy_each = torch._foreach_copy_
"""Copies many tensors on a device with few kernels."""


def is_traced() -> bool:
    """Return whether operations are being recorded as a graph, by ``make_fx``: one on a storage cannot be."""
    return _modes() > 0 and _proxy_mode() is not None


def layout_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that takes as many distinct tensors, and returns whether each has the layout of the one in its place.

    A layout is the type, dtype, shape, strides, device, whether it requires gradients, and the dispatch keys. These
    differ for conjugates, negatives, quantized and sparse tensors, subclasses and inference mode. Compiled code
    checks its arguments so, all of them in one call: 50 ns a tensor, where these properties one by one take 500. It
    must be given tensors with strides alone: for others it would end the process by an error in C++.
    """
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor; another tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def untyped(storage: Any) -> torch.UntypedStorage:
    """The bytes of a storage, which the pickler may meet in one that has a type."""
    return getattr(storage, "_untyped_storage", storage)  # type: ignore[no-any-return]


def archive_reader(file: IO[bytes]) -> Any:
    """Reads the records of an archive that ``torch.save`` has written."""
    return torch._C.PyTorchFileReader(file)


def untraced(hook: _Hook) -> _Hook:
    """A hook that compiled code calls as it is, as of ``torch.compiler.disable``, which would import the compiler."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook


def is_in_backward(frame: FrameType) -> bool:
    """Return whether a thread is in autograd's engine, which writes to gradients alone."""
    return frame.f_code is _engine_run_backward.__code__


def makes_optimizer_states(frame: FrameType) -> bool:
    """Return whether `torch.distributed.checkpoint.state_dict` makes optimizer states here, by a step of its own."""
    return frame.f_code.co_name == "_init_optim_state" and str(frame.f_globals.get("__name__")).startswith("torch.")


def has_hooks(optimizer: "Optimizer") -> bool:
    """Return whether torch's ``Optimizer.__init__`` was called: others' wrappers may be of that type alone."""
    return "_optimizer_step_post_hooks" in vars(optimizer)


def loads_by_place(optimizer: "Optimizer") -> bool:
    """Return whether ``load_state_dict`` is torch's alone, which gives the n-th state to the n-th parameter."""
    own = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return not own and not vars(optimizer).get("_optimizer_load_state_dict_pre_hooks")


def default_store() -> "dist.distributed_c10d.Store":
    """The store in which the process group was formed."""
    return dist.distributed_c10d._get_default_store()


def group_stores() -> list[tuple["dist.ProcessGroup", "dist.distributed_c10d.Store"]]:
    """All process groups of this process, each with the store in which it was formed."""
    pairs = dist.distributed_c10d._world.pg_map.items()
    return [(group, store) for group, (_, store) in pairs if store is not None]


def collective_timeout() -> float:
    """Seconds that ranks wait in a collective, at most, in the most patient of this process's groups; 0 if unknown."""
    longest = 0.0
    for group in [*dist.distributed_c10d._world.pg_map] if dist.is_available() else ():
        for device in group._device_types:
            with suppress(AttributeError, RuntimeError, TypeError):  # a backend of others need not tell
                longest = max(longest, group._get_backend(device).options._timeout.total_seconds())
    return longest


def init_method() -> Any:
    """The URL by which the process group was formed; None if there was none."""
    return dist.distributed_c10d._default_pg_init_method


def compiled_module(model: torch.nn.Module) -> torch.nn.Module | None:
    """The module inside a wrapper of ``torch.compile``, whose type takes seconds to import; None for other modules."""
    return getattr(model, "_orig_mod", None)


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Have autograd call this after all nodes of the running backward, and before callbacks registered later."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` was called: its hooks are then compiled with it."""
    return getattr(module, "_compiled_call_impl", None) is not None


def backward_now() -> int:
    """The number of the backward that runs: one that an operation begins within another has a number of its own."""
    return torch._C._current_graph_task_id()


def compile_none_of(package: str) -> None:
    """Have ``torch.compile`` leave the code of a package to the interpreter, if the compiler is loaded."""
    compiler = sys.modules.get("torch._dynamo.trace_rules")
    if compiler is not None:
        compiler.add(package)
