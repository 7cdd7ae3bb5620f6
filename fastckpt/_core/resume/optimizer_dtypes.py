"""Optimizer states in the dtype in which they were saved: torch casts them to that of their parameter."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer


@contextmanager
def dtypes_kept(optimizer: Optimizer) -> Iterator[None]:
    """While this lasts, ``load_state_dict`` leaves each tensor in its dtype: float32, say, for weights in bfloat16."""
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
