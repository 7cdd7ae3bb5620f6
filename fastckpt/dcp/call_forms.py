"""Two forms of a call that saves: a state dict, or a model and its companions, as in DLRover."""

from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from fastckpt.errors import ArgumentError

_STATE = ("state_dict", "path", "storage_type")
_TRAINING = ("model", "optimizer", "extra_sd", "path", "storage_type")


def by_name(positional: Sequence[Any], **named: Any) -> dict[str, Any]:
    """All arguments after the step by their names; the first one decides the form.

    Raises ArgumentError for too many of them, or one that is given twice.
    """
    names = _TRAINING if positional and isinstance(positional[0], Module) else _STATE
    if len(positional) > len(names):
        form = f"save_checkpoint(step, {', '.join(names)})"
        raise ArgumentError(f"{form} takes {len(names) + 1} positional arguments; {len(positional) + 1} were given")
    # In Flash Checkpoint an optimizer or extra_sd that is not there is None.
    named = {name: each for name, each in named.items() if each is not None}
    given = dict(zip(names, positional, strict=False))
    if twice := given.keys() & named.keys():
        raise ArgumentError(f"save_checkpoint got {min(twice)!r} by its place and by its name")
    return {name: each for name, each in {**given, **named}.items() if each is not None}
