"""The training with Lightning: DDP, dropout, AdamW, a scheduler, validation; way: unseeded."""

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


def main() -> None:
    args = training.parser().parse_args()
    run, io = Run(args, RANK), FastCheckpointIO(args.checkpoint_dir, overlap=args.overlap)
    model = ModelCheckpoint(args.checkpoint_dir, "{step}", save_top_k=-1, every_n_train_steps=args.disk)
    ours = {"strategy": FastDDPStrategy(), "plugins": [io], "use_distributed_sampler": False}
    trainer = trainer_for(args.steps, model, MemoryCheckpoint(args.memory), Watch(io, run), **ours)
    module = Module(args.way, run.log)
    trainer.fit(module, ckpt_path=NEWEST)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    state = [module.state_dict(), trainer.optimizers[0].state_dict(), scheduler.state_dict()]
    state += [torch.get_rng_state(), random.random(), numpy.random.random()]
    run.end(state)


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
