"""Optimizers: those inside wrappers, their classes in a checkpoint, and options that a load leaves as they are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fastckpt._core.error_codes import coded
from fastckpt._core.torch_private.tensors import has_hooks
from fastckpt.errors import ConfigError

Kinds = dict[str, list[list[str]]]
"""Classes of each optimizer, its own and those that it refines, for each part of a state that has optimizers."""

_WITHIN = ("optimizer", "optim")
"""Attributes in which wrappers have their optimizer: accelerate's, and torch's ZeroRedundancyOptimizer."""

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer; of one that is an Optimizer by its type alone, the one that it has.

    Such a wrapper has never called ``super().__init__()``, so torch can neither hook into its steps nor load its state.

    Raises ConfigError if it has none, or several.
    """
    if has_hooks(optimizer):
        return optimizer
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer) and each is not optimizer]
    if len(inner) != 1:
        raise ConfigError(
            f"{type(optimizer).__name__} is an optimizer whose __init__ has not called super().__init__(), and that "
            f"has {len(inner)} optimizers as attributes, not one: give the torch optimizer that it wraps"
        )
    return unwrapped(inner[0])


def kinds(parts: Mapping[str, Any]) -> Kinds:
    """The classes of the optimizers in a state; raises ConfigError for an optimizer that no rank has whole."""
    for part in parts.values():
        refuse_sharded(part)
    several = {name: part if isinstance(part, Sequence) else (part,) for name, part in parts.items()}
    return {
        name: [_classes(state_owner(each)) for each in part]
        for name, part in several.items()
        if part and all(isinstance(state_owner(each), Optimizer) for each in part)
    }


def refuse_sharded(part: Any) -> None:
    """Raise ConfigError for ZeroRedundancyOptimizer, or a sequence that has one.

    Each rank has a part of its state, and ``state_dict`` gives the whole on one rank alone, once that was consolidated.
    """
    for each in part if isinstance(part, Sequence) else (part,):
        if any(kind.__module__ == _ZERO for kind in type(each).__mro__):
            raise ConfigError(
                f"{type(each).__name__} spreads the optimizer's state over ranks, and only one of them is given all of "
                "it: a resume could not have it. Give a torch optimizer, such as AdamW; where its state is too large, "
                "shard the model with fully_shard (docs/guides/fsdp.md)"
            )


def check_kinds(saved: Any, now: Kinds) -> None:
    """Raise ConfigError unless these are the optimizers of a checkpoint, or refine them; one may not name any."""
    for name in now if isinstance(saved, Mapping) else ():
        before = saved.get(name, [])
        for i, (old, new) in enumerate(zip(before, now[name], strict=False)):
            if not set(old) & set(new):
                which = f"{name} {i}" if len(now[name]) > 1 else name
                raise ConfigError(
                    coded(
                        f"{which} was saved as {old[0]}, and is {new[0]} now: the state of one means nothing to the "
                        f"other. Give {old[0]}; or, to go on with {new[0]}, load the model alone out of the "
                        "checkpoint's files, and give another checkpoint directory",
                        "FC-043",
                    )
                )


def state_owner(part: Any) -> Any:
    """The optimizer in a wrapper that gives its state as its own; anything else as it is, such as a scheduler."""
    for name in _WITHIN:
        inner = getattr(part, name, None)
        if isinstance(inner, Optimizer) and not isinstance(part, LRScheduler):
            return state_owner(inner)
    return part


def _classes(optimizer: Optimizer) -> list[str]:
    """A user's own class, and its bases, up to the first one of torch's: AdamW derives from Adam, and is none."""
    found = []
    for kind in type(optimizer).__mro__:
        if kind is Optimizer or not issubclass(kind, Optimizer):
            continue
        found.append(kind.__name__)
        if kind.__module__.startswith("torch.optim."):
            break
    return found


@contextmanager
def options_kept(optimizer: Optimizer) -> Iterator[None]:
    """Have ``load_state_dict`` leave options of groups that the state lacks, such as those of a newer torch."""
    before = [dict(group) for group in optimizer.param_groups]
    yield
    for group, old in zip(optimizer.param_groups, before, strict=False):
        for name in old.keys() - group.keys():
            group[name] = old[name]


@contextmanager
def dtypes_kept(optimizer: Optimizer) -> Iterator[None]:
    """Have ``load_state_dict`` leave each tensor in its dtype, such as float32 for weights in bfloat16."""
    given: dict[str, Any] = {}

    def before(optimizer: Optimizer, state: dict[str, Any]) -> None:
        given.update(state)

    def after(optimizer: Optimizer) -> None:
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            state: dict[str, Any] = optimizer.state[parameter] if number in given["state"] else {}
            for name, saved in given["state"].get(number, {}).items():
                cast = state.get(name)
                if isinstance(saved, torch.Tensor) and isinstance(cast, torch.Tensor) and saved.dtype != cast.dtype:
                    state[name] = saved.to(cast.device)

    hooks = optimizer.register_load_state_dict_pre_hook(before), optimizer.register_load_state_dict_post_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
