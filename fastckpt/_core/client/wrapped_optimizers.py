"""Optimizers that others wrap, such as a trainer's: torch's own functions need those that are its own."""

from torch.optim import Optimizer

from fastckpt._core.torch_private.tensors import has_hooks
from fastckpt.errors import ConfigError


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
