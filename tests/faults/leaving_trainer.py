"""The training of leaving.py by transformers' Trainer, whose loop is its own: a rank leaves from a callback."""

import argparse
import gc
import os
from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from fastckpt.huggingface import FastCheckpointTrainer
from tests.e2e.huggingface.stock import make_trainer
from tests.faults.diary import Log, digest
from tests.faults.leaving import CLOSES, ENDS, leave, raise_in_save, tell


class Leaving(TrainerCallback):
    """Logs what happens, and leaves. What a trainer's user can do to close early is to stop training."""

    trainer: Trainer

    def __init__(self, args: argparse.Namespace, log: Log) -> None:
        self._way = args.way if int(os.environ["RANK"]) == args.rank else ""
        self._at = 1 if args.way == "closes-early" else args.step
        self._log = log
        self._told = 0

    def state(self) -> str:
        return digest([self.trainer.model.state_dict(), self.trainer.optimizer.state_dict()])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        found = {"loaded": max(0, state.global_step), "tier": self.trainer.loaded_from, "state": self.state()}
        self._log(**found, start=[int(os.environ["FAULTS_LAUNCH"]), 0])
        if self._way == "raises-in":
            raise_in_save(self._at)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        self._log(step=step, state=self.state())
        if step == self._at and self._way == "raises-before":
            leave(self._way)
        if step == self._at and self._way in (*CLOSES, "returns"):
            control.should_training_stop = True
            self._log(left=step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell()
        if state.global_step == self._at and self._way not in ("raises-before", "raises-in", "returns", *CLOSES):
            leave(self._way)

    def tell(self) -> None:
        """Log what became of the save after the last step."""
        result = self.trainer.last_save
        if result is not None and result.step != self._told:
            self._told = result.step
            tell(self._log, result.step, result)


def run(args: argparse.Namespace) -> None:
    """Train, and log."""
    log = Log(args.out, int(os.environ["RANK"]))
    defaults = {"way": "ddp", "eval": 0, "best": 0, "patience": 0, "accumulate": 1}
    callback = Leaving(args, log)
    constant = ['lr_scheduler_type="constant"']  # whatever the number of steps is
    told = argparse.Namespace(**vars(args) | defaults, set=constant)
    trainer = callback.trainer = make_trainer(told, FastCheckpointTrainer, callback, save_memory_steps=1)
    trainer.train(resume_from_checkpoint=True)
    callback.tell()
    if callback._way in ENDS:
        return
    del trainer, callback.trainer
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
