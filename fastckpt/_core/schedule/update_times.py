"""Measures how long weight updates take, on the device that makes them."""

import time
from collections import deque
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fastckpt._core.torch_private.tensors import untraced
from fastckpt._core.transfer.device_copy import records_graph

UNREAD = 64
"""Turns of which a device may still owe the times."""

Span = tuple[torch.Event, torch.Event]


class UpdateTimes:
    """Times the steps of all optimizers of this process, until `close`. What a device does is not waited for."""

    def __init__(self) -> None:
        self._seconds = self._last = 0.0
        self._begun: float | torch.Event = 0.0
        self._spans: list[Span] = []
        self._unread: deque[list[Span]] = deque(maxlen=UNREAD)
        self._hooks = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]

    def turn(self) -> float:
        """Seconds of the updates since the last turn; where devices make them, of the latest that they have ended."""
        if self._spans:
            self._unread.append(self._spans)
            self._spans = []
        while self._unread and all(ended.query() for _, ended in self._unread[0]):
            self._last = sum(begun.elapsed_time(ended) for begun, ended in self._unread.popleft()) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        return seconds + self._last

    def close(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()

    @untraced
    def _begins(self, optimizer: Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        device = _device(optimizer)
        self._begun = time.monotonic() if device is None else _event(device)

    @untraced
    def _ends(self, optimizer: Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        device = _device(optimizer)
        if isinstance(self._begun, float):
            self._seconds += time.monotonic() - self._begun
        elif device is not None:
            self._spans.append((self._begun, _event(device)))


def _device(optimizer: Optimizer) -> torch.device | None:
    """The accelerator that has its first parameter; None for the processor, and while a graph is recorded."""
    if records_graph():
        return None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return None if parameter.device.type == "cpu" else parameter.device
    return None


def _event(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event
