"""A small training with Lightning: DDP, dropout, AdamW, a scheduler, validation; logs as tests/faults/train.py does."""

import argparse
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fastckpt._core.snapshot import mutation_check
from fastckpt.lightning import NEWEST, FastCheckpointIO, FastDDPStrategy, MemoryCheckpoint

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.e2e.lightning.training import RANK, Module, trainer_for
from tests.faults.diary import Log, digest, parser_of_all
from tests.faults.faults import inject_requested_faults


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_all()
    parser.add_argument("--way", default="", help="epochs: a plain loader, saved at their ends; top: keep the best two")
    parser.add_argument("--overlap", action="store_true", help="copy what the optimizer changes in the background")
    parser.add_argument("--resume-path", default=NEWEST)
    parser.add_argument("--die", action="store_true", help="with the agent, after the last step")
    return parser.parse_args()


class Watch(Callback):
    """Logs what was loaded and saved."""

    def __init__(self, io: FastCheckpointIO, log: Log, die: bool) -> None:
        self._io, self._log, self._die = io, log, die
        self._saved = self._pending = -1

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        start = [int(os.environ["FAULTS_LAUNCH"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
        assert trainer.global_step == max(self._io.loaded_step, 0)
        self._log(loaded=trainer.global_step, tier=self._io.loaded_from, pid=os.getpid(), start=start)

    def on_train_batch_start(self, *_: Any) -> None:
        if self._io._saves is not None and self._io._saves.saved_step > self._saved:
            self._saved = self._pending = self._io._saves.saved_step
            if not self._io.overlap:
                self._tell()

    def on_train_batch_end(self, *_: Any) -> None:
        self._tell()  # the optimizer has waited for it

    def _tell(self) -> None:
        if self._pending >= 0:
            self._log(saved=self._pending)
            self._pending = -1

    def on_train_end(self, *_: Any) -> None:
        if self._die:
            if self._io._saves is not None:
                self._io._saves.settle_storage()
            dist.barrier()
            if RANK == 0:
                os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()


def model_checkpoint(args: argparse.Namespace) -> ModelCheckpoint:
    if args.way == "epochs":
        return ModelCheckpoint(args.checkpoint_dir, save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=False)
    if args.way == "top":
        name = "{step}-{val:.6f}"
        return ModelCheckpoint(
            args.checkpoint_dir,
            name,
            "val",
            save_top_k=2,
            save_last=True,
            every_n_epochs=1,
            save_on_train_epoch_end=False,
        )
    return ModelCheckpoint(args.checkpoint_dir, "{step}", save_top_k=-1, every_n_train_steps=args.disk)


def train(args: argparse.Namespace) -> None:
    log = Log(args.out, RANK)
    inject_requested_faults(RANK, args.out)
    if args.overlap:
        mutation_check.WORTH = 1  # the largest storage has 800 bytes
    io, model = FastCheckpointIO(args.checkpoint_dir, overlap=args.overlap), model_checkpoint(args)
    callbacks = [MemoryCheckpoint(args.memory)] if args.way != "epochs" else []
    ours = {"strategy": FastDDPStrategy(), "plugins": [io], "use_distributed_sampler": args.way == "epochs"}
    trainer = trainer_for(args.steps, model, *callbacks, Watch(io, log, args.die), **ours)
    module = Module(args.way, log)
    trainer.fit(module, ckpt_path=args.resume_path)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    state = [module.state_dict(), trainer.optimizers[0].state_dict(), scheduler.state_dict()]
    state += [torch.get_rng_state(), random.random(), numpy.random.random()]
    if args.way == "top":
        state += [model.best_model_path, {path: score.item() for path, score in model.best_k_models.items()}]
        kept = sorted(path for path in os.listdir(args.checkpoint_dir) if path.endswith(".ckpt"))
        log(
            kept=kept, expected=sorted(os.path.basename(path) for path in [*model.best_k_models, model.last_model_path])
        )
        state = [
            part if not isinstance(part, str | dict) else repr(part).replace(args.checkpoint_dir, "") for part in state
        ]
    (args.out / f"end.{RANK}").write_text(digest(state))


if __name__ == "__main__":
    train(parse_arguments())
    dist.barrier()
    dist.destroy_process_group()
