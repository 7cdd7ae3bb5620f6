"""Training with accelerate, shared by our program and the stock one; this file does not use fastckpt."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Count:
    """Registered for checkpointing."""

    def __init__(self) -> None:
        self.steps = 0
        self.table = torch.zeros(100)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.table = state["steps"], state["table"]


class Training:
    """All that is prepared; the same in the stock program."""

    def __init__(self, *, stateful: bool = False, hooks: bool = False) -> None:
        torch.manual_seed(7)
        options = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3, use_stateful_dataloader=stateful)
        self.accelerator = Accelerator(cpu=True, dataloader_config=options)
        model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        data = TensorDataset(torch.randn(96, 8), torch.randint(4, (96,)))
        loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator())
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        if hooks:
            self.accelerator.register_save_state_pre_hook(self._save)
            self.accelerator.register_load_state_pre_hook(self._load)
        torch.manual_seed(11 + self.accelerator.process_index)

    def _save(self, models: list[nn.Module], weights: list[Any], place: str) -> None:
        state = weights.pop()
        if self.accelerator.is_main_process:
            torch.save(state, f"{place}/adapter.bin")
        number = self.accelerator.process_index
        torch.save({"rank": number}, f"{place}/of_rank_{number}.bin")

    def _load(self, models: list[nn.Module], place: str) -> None:
        number = self.accelerator.process_index
        assert torch.load(f"{place}/of_rank_{number}.bin") == {"rank": number}
        models.pop().load_state_dict(torch.load(f"{place}/adapter.bin"))

    def state(self) -> list[Any]:
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return [model, optimizer, self.scheduler.state_dict(), self.count.state_dict(), torch.get_rng_state()]


def batches(training: Training, step: int, stateful: bool) -> Any:
    """The batches from here on, as users of accelerate go on within an epoch."""
    length = len(training.loader)
    epoch = step // length
    training.loader.set_epoch(epoch)
    if step % length and not stateful:
        yield from training.accelerator.skip_first_batches(training.loader, step % length)
        epoch += 1
    while True:
        training.loader.set_epoch(epoch)
        yield from training.loader
        epoch += 1


def advance(training: Training, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(training.model(inputs), targets)
    training.accelerator.backward(loss)
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    training.count.steps += 1
    training.count.table += training.count.steps
    return loss
