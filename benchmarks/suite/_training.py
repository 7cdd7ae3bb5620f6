"""Training of the GPT-2 of _states on one core, whose steps can be interrupted by saves."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.suite._states import gpt2

TOKENS = 32


class Training:
    """A GPT-2 of 12 layers and its AdamW.

    Args:
        gigabytes: About the size of both.
        around: Wraps the model before there is an optimizer, such as to shard it.

    Attributes:
        busy: Seconds of the processor that this thread has spent in steps.
        waited: Seconds from the begin of the last update until the optimizer wrote for the first time.
    """

    def __init__(self, gigabytes: float, around: Callable[[Any], object] = lambda model: model) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = gpt2(gigabytes, dropout=0.0)
        around(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.busy = self.waited = self._begin = 0.0
        # After the hooks for all optimizers, in which a save may wait.
        self.optimizer.register_step_pre_hook(self._note_wait)
        self.step()

    def _note_wait(self, *_: object) -> None:
        self.waited = time.perf_counter() - self._begin

    def state(self) -> dict[str, Any]:
        """Return the state to save: the tensors themselves, as state_dict() gives them."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": 0}

    def backward(self) -> None:
        """Forward and backward of one short sequence."""
        begin = time.thread_time()
        loss = self.model(torch.randint(50257, (1, TOKENS))).float().logsumexp(-1).mean()
        loss.backward()
        self.busy += time.thread_time() - begin

    def update(self) -> None:
        """The optimizer's step, which writes to all of the state."""
        begin, self._begin = time.thread_time(), time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.busy += time.thread_time() - begin

    def step(self) -> None:
        """A whole step."""
        self.backward()
        self.update()
