"""Effects of imports that each forked worker repeats: a rank that a module keeps, a variable that it sets."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from fastckpt_run.preload.environment import current


def _of_lightning(module: Any) -> int:
    return int(module._get_rank() or 0)


def _of_torchmetrics(_: Any) -> int:
    return int(current().get("LOCAL_RANK", "0"))


_RANKS: dict[str, Callable[[Any], int]] = {
    "lightning.fabric.utilities.rank_zero": _of_lightning,
    "lightning_fabric.utilities.rank_zero": _of_lightning,
    "torchmetrics.utilities.prints": _of_torchmetrics,
}
"""Value to which each of RANK_KEEPERS sets `rank_zero_only.rank` in its body."""
_VARIABLES = {
    "lightning.fabric": ("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
    "lightning_fabric": ("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
}
"""Modules that set a variable when they are imported, whatever it was; torch reads this one when it looks for CUDA."""
SET = frozenset(_VARIABLES.values())
"""Variables that imports may set, with their values."""


def unknown() -> Iterator[str]:
    """Reasons why workers cannot repeat the imports' effects: another release may keep the rank in another way."""
    for name, rank in _RANKS.items():
        module = sys.modules.get(name)
        try:
            if module is not None and module.rank_zero_only.rank != rank(module):
                yield f"has {name} keep another rank than it reads"
        except AttributeError:
            yield f"has {name} keep the rank in a way that is not known"


def variables() -> dict[str, str]:
    """The variables that modules which are imported have set."""
    return dict(_VARIABLES[name] for name in _VARIABLES.keys() & sys.modules.keys())


def read_ranks() -> None:
    """Have modules that keep the rank read this process's."""
    for name, rank in _RANKS.items():
        if (module := sys.modules.get(name)) is not None:
            module.rank_zero_only.rank = rank(module)
