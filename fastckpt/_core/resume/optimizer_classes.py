"""Classes of optimizers, as a checkpoint names them: the state of one means nothing to another, though it may load."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from fastckpt.errors import ConfigError

Kinds = dict[str, list[list[str]]]
"""For each part of a training that has optimizers, the classes of each: its own, and those that it refines."""

_WITHIN = ("optimizer", "optim")
"""Where wrappers have the optimizer whose state is theirs: accelerate's, and torch's ZeroRedundancyOptimizer."""

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def kinds(parts: Mapping[str, Any]) -> Kinds:
    """Those of a training's parts; raises ConfigError for an optimizer that no rank has whole."""
    for part in parts.values():
        refuse_sharded(part)
    several = {name: part if isinstance(part, Sequence) else (part,) for name, part in parts.items()}
    return {
        name: [_classes(unwrapped(each)) for each in part]
        for name, part in several.items()
        if part and all(isinstance(unwrapped(each), Optimizer) for each in part)
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
                "shard the model with fully_shard (docs/fsdp.md)"
            )


def check_kinds(saved: Any, now: Kinds) -> None:
    """Raise ConfigError unless these are the optimizers of a checkpoint, or refine them; one may not name any."""
    for name in now if isinstance(saved, Mapping) else ():
        before = saved.get(name, [])
        for i, (old, new) in enumerate(zip(before, now[name], strict=False)):
            if not set(old) & set(new):
                which = f"{name} {i}" if len(now[name]) > 1 else name
                raise ConfigError(
                    f"{which} was saved as {old[0]}, and is {new[0]} now: the state of one means nothing to the other. "
                    f"Give {old[0]}; or, to go on with {new[0]}, load the model alone out of the checkpoint's files, "
                    "and give another checkpoint directory"
                )


def unwrapped(part: Any) -> Any:
    """The optimizer whose state a wrapper gives as its own; anything else as it is."""
    for name in _WITHIN:
        inner = getattr(part, name, None)
        if isinstance(inner, Optimizer):
            return unwrapped(inner)
    return part


def _classes(optimizer: Optimizer) -> list[str]:
    """A user's own class, and what it refines, up to the first one of torch's: AdamW derives from Adam, and is none."""
    found = []
    for kind in type(optimizer).__mro__:
        if kind is Optimizer or not issubclass(kind, Optimizer):
            continue
        found.append(kind.__name__)
        if kind.__module__.startswith("torch.optim."):
            break
    return found
