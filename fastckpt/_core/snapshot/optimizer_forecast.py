"""Predicts the size of an optimizer's state after its first step, so that memory is ready before the first save."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastckpt._core.torch_private.tensors import untraced

logger = logging.getLogger("fastckpt")

State = dict[str, Any]


class SizeForecast:
    """The bytes of a job's state, known once its optimizers have made theirs: before the first save.

    Args:
        name: Of the file that the state will be in.
        report: A method that is called once, in the main thread, when an optimizer takes its second step. It gets the
            bytes of all parameters that are trained, and of their optimizers' states, by the name.
    """

    def __init__(self, name: str, report: Callable[[dict[str, int]], None]) -> None:
        self._name = name
        self._report = weakref.WeakMethod(report)  # torch keeps the hook: it must not keep a session that nobody closed
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._pid = os.getpid()
        self._is_over = False
        self._hook = register_optimizer_step_post_hook(self._stepped)

    @untraced
    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        is_ours = os.getpid() == self._pid and threading.current_thread() is threading.main_thread()
        if self._is_over or not is_ours:
            return
        try:
            if optimizer not in self._seen:
                self._seen.add(optimizer)
                return
            self._is_over = True  # torch goes through its hooks: this one cannot be removed now
            if (report := self._report()) is not None:
                report({self._name: _bytes_of(self._seen)})
        except Exception as error:  # noqa: BLE001
            # Users' optimizers may be of any make, and an exception here would end their step.
            self._is_over = True
            logger.debug("the size of the first save is not predicted: %s", error)

    def end(self) -> None:
        """Report no more: the first save shows the size."""
        self._is_over = True
        self._hook.remove()


def _bytes_of(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    storages = {}
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            held = optimizer.state.get(parameter, {})
            for tensor in (parameter, *(held.values() if isinstance(held, Mapping) else [held])):
                # Others, such as sparse ones and those of subclasses, have no storage of their own to ask.
                if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


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
