"""Epochs with validations within and after them, early stopping and the best of all, saved at an epoch's end.

Rank 1 is killed twice: in a validation within an epoch, and as the second epoch begins.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[3]))
from fastckpt.data import ResumableDataLoader
from fastckpt.lightning import NEWEST, FastCheckpointIO, FastDDPStrategy, MemoryCheckpoint
from tests.e2e.lightning.training import RANK, WORLD, Module, Seeds, samples

OUT, KILLS = Path(sys.argv[1]), set(sys.argv[2:])


class Kill(Callback):
    """Kills rank 1 at each of the places, once."""

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self._kill("validation")

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            self._kill("epoch")

    def _kill(self, place: str) -> None:
        if RANK == 1 and place in KILLS and not (OUT / place).exists():
            (OUT / place).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def log(**fields: Any) -> None:
    if RANK == 0:
        with (OUT / "log").open("a") as file:
            file.write(json.dumps(fields) + "\n")


class Watch(Callback):
    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        log(epoch=trainer.current_epoch, at=trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        log(epoch_ended=trainer.current_epoch, at=trainer.global_step)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        log(validated=trainer.global_step, loss=float(trainer.callback_metrics["val"]).hex())


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    stop = EarlyStopping("val", patience=3, min_delta=1.0)
    best = ModelCheckpoint(str(OUT / "ck"), "{step}-{val:.4f}", monitor="val", save_top_k=2, save_last=True)
    ends = ModelCheckpoint(str(OUT / "ck"), save_on_train_epoch_end=True)
    trainer = Trainer(
        max_epochs=3,
        val_check_interval=3,
        accelerator="cpu",
        devices=WORLD,
        strategy=FastDDPStrategy(),
        plugins=[FastCheckpointIO(OUT / "ck")],
        callbacks=[MemoryCheckpoint(), Kill(), stop, best, ends, Seeds(), Watch()],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Module("unseeded", log)
    loader = ResumableDataLoader(samples(64), 4, shuffle=True)
    trainer.fit(module, loader, DataLoader(samples(16), 4, generator=torch.Generator()), ckpt_path=NEWEST)
    weights = float(sum(each.double().sum() for each in module.state_dict().values())).hex()
    kept = {Path(path).name: float(score).hex() for path, score in best.best_k_models.items()}
    log(end=trainer.global_step, epochs=trainer.current_epoch, weights=weights, waits=stop.wait_count, kept=kept)


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
