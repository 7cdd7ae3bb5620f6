"""Epochs with validations within and after them, early stopping and the best of all, saved at an epoch's end.

Rank 1 is killed twice: in a validation within an epoch, and as the second epoch begins. The last process trains once
more, and nothing befalls it. Workers are forks of a process that has imported Lightning: each has its own rank.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["IS_FORKED"] = str("lightning.pytorch" in sys.modules)

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[3]))
from fastckpt.data import ResumableDataLoader
from fastckpt.lightning import NEWEST, FastCheckpointIO, FastDDPStrategy, MemoryCheckpoint
from tests.e2e.lightning.training import RANK, WORLD, Module, Seeds, samples

OUT = Path(sys.argv[1])


class Kill(Callback):
    """Kills rank 1 at each of the places, once."""

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._kill(trainer, "validation", trainer.global_step == 3)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self._kill(trainer, "epoch", trainer.current_epoch == 1)

    def _kill(self, trainer: Trainer, place: str, is_here: bool) -> None:
        if is_here and RANK == 1 and not (OUT / place).exists():
            (OUT / place).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Watch(Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, **fields: Any) -> None:
        if RANK == 0:
            with (self._folder / "log").open("a") as file:
                file.write(json.dumps(fields) + "\n")

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.note(epoch=trainer.current_epoch, at=trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(epoch_ended=trainer.current_epoch, at=trainer.global_step)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(validated=trainer.global_step, loss=float(trainer.callback_metrics["val"]).hex())


def train(folder: Path, *callbacks: Callback) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    watch, stop = Watch(folder), EarlyStopping("val", patience=3, min_delta=1.0)
    best = ModelCheckpoint(str(folder / "ck"), "{step}-{val:.4f}", monitor="val", save_top_k=2, save_last=True)
    ends = ModelCheckpoint(str(folder / "ck"), save_on_train_epoch_end=True)
    trainer = Trainer(
        max_epochs=3,
        val_check_interval=3,
        accelerator="cpu",
        devices=WORLD,
        strategy=FastDDPStrategy(),
        plugins=[FastCheckpointIO(folder / "ck")],
        callbacks=[MemoryCheckpoint(), *callbacks, stop, best, ends, Seeds(), watch],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Module("unseeded", watch.note)
    loader = ResumableDataLoader(samples(64), 4, shuffle=True)
    trainer.fit(module, loader, DataLoader(samples(16), 4, generator=torch.Generator()), ckpt_path=NEWEST)
    weights = float(sum(each.double().sum() for each in module.state_dict().values())).hex()
    kept = {Path(path).name: float(score).hex() for path, score in best.best_k_models.items()}
    watch.note(end=trainer.global_step, epochs=trainer.current_epoch, weights=weights, waits=stop.wait_count, kept=kept)


if __name__ == "__main__":
    keepers = [module for module in [*sys.modules.values()] if "rank_zero_only" in getattr(module, "__dict__", ())]
    assert os.environ["IS_FORKED"] == "True" and {module.rank_zero_only.rank for module in keepers} == {RANK}
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    train(OUT / "killed", Kill())
    train(OUT / "undisturbed")
    dist.barrier()
    dist.destroy_process_group()
