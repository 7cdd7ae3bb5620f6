"""Training with Lightning."""

import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastckpt.lightning import FastCheckpointIO, FastSingleDeviceStrategy, MemoryCheckpoint

warnings.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SEEDED = 10
"""After this step each has its own seeds: stock Lightning keeps no generators, and could not go on else."""


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


class Loader:
    """Shuffled batches of this rank; its state is where it is."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data
        self._epoch = self._taken = 0

    def __len__(self) -> int:
        return len(self._data) // (4 * WORLD)

    def __iter__(self) -> Iterator[Any]:
        if self._taken == len(self):
            self._epoch, self._taken = self._epoch + 1, 0
        order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(self._epoch)).view(-1, 4)
        while self._taken < len(self):
            self._taken += 1
            yield self._data[order[WORLD * (self._taken - 1) + RANK]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._taken = state["epoch"], state["taken"]


class Module(LightningModule):
    """Draws from all generators that a resume has to bring back."""

    def __init__(self, way: str = "", log: Callable[..., None] = lambda **_: None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))
        self._way, self._log = way, log

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return Loader(samples(64))

    def val_dataloader(self) -> Any:
        return DataLoader(samples(16), 4, generator=torch.Generator())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        step = self.global_step + 1
        if step > SEEDED and self._way != "unseeded":
            seed(100 * step + RANK)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        loss = loss + 1e-3 * (random.random() + numpy.random.random()) * self.net[0].weight.square().sum()
        self._log(step=step, loss=loss.item().hex())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


class Seeds(Callback):
    def setup(self, *_: Any, **__: Any) -> None:
        seed(11 + RANK)


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(4, (count,), generator=generator))


def trainer_for(steps: int, model: ModelCheckpoint, *callbacks: Callback, **more: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=WORLD,
        max_steps=steps,
        callbacks=[Seeds(), *callbacks, model],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def trainer_of(folder: Path, steps: int, model: ModelCheckpoint, *callbacks: Callback, **more: Any) -> Trainer:
    """One of a single process that saves by our plugin, which is its `strategy.checkpoint_io`."""
    ours = {"strategy": FastSingleDeviceStrategy(torch.device("cpu")), "plugins": [FastCheckpointIO(folder)]}
    ours |= {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
    return trainer_for(steps, model, MemoryCheckpoint(), *callbacks, **ours | more)
