"""The training with Lightning: DDP, dropout, AdamW, a scheduler, validation; ways: unseeded, top."""

import os
import random
from typing import Any

import numpy
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fastckpt.lightning import NEWEST, FastCheckpointIO, FastDDPStrategy, MemoryCheckpoint
from tests.e2e.lightning.training import RANK, Module, trainer_for
from tests.faults import training
from tests.faults.training import Run


class Watch(Callback):
    """Logs what was loaded and saved."""

    def __init__(self, io: FastCheckpointIO, run: Run) -> None:
        self._io, self._run = io, run
        self._saved = self._pending = -1

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        assert trainer.global_step == max(self._io.loaded_step, 0)
        self._run.resumed(trainer.global_step, self._io.loaded_from)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._run.begins(trainer.global_step + 1)
        if self._io._saves is not None and self._io._saves.saved_step > self._saved:
            self._saved = self._pending = self._io._saves.saved_step
            if not self._io.overlap:
                self._tell()

    def on_train_batch_end(self, *_: Any) -> None:
        self._tell()  # the optimizer has waited for it

    def _tell(self) -> None:
        if self._pending >= 0:
            self._run.log(saved=self._pending)
            self._pending = -1


def model_checkpoint(directory: str, way: str, steps: int) -> ModelCheckpoint:
    """One that saves every so many steps; or the best two, as an epoch ends."""
    if way == "top":
        best = {"save_top_k": 2, "save_last": True, "every_n_epochs": 1, "save_on_train_epoch_end": False}
        return ModelCheckpoint(directory, "{step}-{val:.6f}", "val", **best)
    return ModelCheckpoint(directory, "{step}", save_top_k=-1, every_n_train_steps=steps)


def main() -> None:
    args = training.parser().parse_args()
    run, way = Run(args, RANK), args.way
    io, model = (
        FastCheckpointIO(args.checkpoint_dir, overlap=args.overlap),
        model_checkpoint(args.checkpoint_dir, way, args.disk),
    )
    ours = {"strategy": FastDDPStrategy(), "plugins": [io], "use_distributed_sampler": False}
    trainer = trainer_for(args.steps, model, MemoryCheckpoint(args.memory), Watch(io, run), **ours)
    module = Module(way, run.log)
    trainer.fit(module, ckpt_path=args.resume_path or NEWEST)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    state = [module.state_dict(), trainer.optimizers[0].state_dict(), scheduler.state_dict()]
    state += [torch.get_rng_state(), random.random(), numpy.random.random()]
    if way == "top":
        scores = {path: score.item() for path, score in model.best_k_models.items()}
        state += [repr(each).replace(args.checkpoint_dir, "") for each in (model.best_model_path, scores)]
        kept = sorted(path for path in os.listdir(args.checkpoint_dir) if path.endswith(".ckpt"))
        assert kept == sorted(os.path.basename(path) for path in [*model.best_k_models, model.last_model_path])
    run.end(state)


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
