"""Predicts what an optimizer will hold after its first step, so that memory is ready before the first save."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def _adam(parameter: Tensor, group: State) -> State:
    state = {"step": torch.empty(()), "exp_avg": _like(parameter), "exp_avg_sq": _like(parameter)}
    if group.get("amsgrad"):
        state["max_exp_avg_sq"] = _like(parameter)
    return state


def _sgd(parameter: Tensor, group: State) -> State:
    return {"momentum_buffer": _like(parameter)} if group.get("momentum") else {}


_FORESEEN: dict[type[torch.optim.Optimizer], Callable[[Tensor, State], State]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
}


def _like(parameter: Tensor) -> Tensor:
    # The memory is never touched, so the kernel never provides its pages.
    return torch.empty_like(parameter, requires_grad=False, device="cpu")


def with_optimizer_state(state_dict: State, optimizer: torch.optim.Optimizer | None) -> State:
    """The state with the optimizer's part as after its first step; unchanged for optimizers not known here."""
    # The exact type: a subclass may keep more state, and too small a reservation would be made again at the first save.
    if optimizer is None or optimizer.state or type(optimizer) not in _FORESEEN:
        return state_dict
    foresee = _FORESEEN[type(optimizer)]
    pairs = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    trained = {i: foresee(p, group) for i, (p, group) in enumerate(pairs) if p.requires_grad}
    empty = [key for key, part in state_dict.items() if _is_empty_optimizer(part)]
    return state_dict | {key: state_dict[key] | {"state": trained} for key in empty}


def _is_empty_optimizer(part: object) -> bool:
    return isinstance(part, dict) and "param_groups" in part and part.get("state") == {}
