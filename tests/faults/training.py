"""A training under faults: arguments, a log, faults and the digest of the end, which all programs have in common.

Each rank appends a line of JSON for all that happens to ``<out>/log.<rank>``, and at the end writes the digest of what
it has to ``<out>/end.<rank>``.
"""

import argparse
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from select import select
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fastckpt._core import metrics
from fastckpt._core.snapshot import mutation_check
from fastckpt.ddp import SaveResult, StorageType
from tests.faults.diary import Log, digest, parser_of_all
from tests.faults.faults import inject_requested_faults

warnings.filterwarnings("ignore")
PAUSE = 0.5
"""Seconds that training rests after a save that was skipped for a persist: its steps take a millisecond, and a slow
disk would see nothing of it."""


def parser() -> argparse.ArgumentParser:
    """Of what each program is told; ``way`` is one of several ways to train or to save, which the program has."""
    made = parser_of_all()
    made.add_argument("--way", default="")
    made.add_argument("--overlap", action="store_true", help="copy what the optimizer changes in the background")
    made.add_argument("--wait", action="store_true", help="go on when a save to storage is durable")
    made.add_argument("--wait-at", type=int, nargs="*", default=[], help="wait here until a file go.<step> appears")
    made.add_argument("--stop-at", type=int, default=0, help="train up to here, then wait to be ended")
    made.add_argument("--full", action="store_true", help="keep the whole state of each save, and compare with it")
    made.add_argument("--last-save", action="store_true", help="do the step that has begun, and save it, at SIGTERM")
    made.add_argument("--leave", nargs=3, default=None, metavar=("RANK", "STEP", "WAY"), help="returns, exits, closes")
    return made


class Run:
    """The log of one rank, and what it is told to do between its steps."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.rank = args, rank
        self.log = Log(args.out, rank)
        self.restarts = 0
        self._pending = 0
        if args.overlap:
            mutation_check.WORTH = 1  # states are small here
        inject_requested_faults(rank, args.out)

    def resumed(self, step: int, tier: str, **more: Any) -> None:
        restarts = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        if dist.is_initialized():
            dist.all_reduce(restarts)  # the agent of a node whose own workers did not fail does not count their restart
        self.restarts = int(restarts)
        start = [int(os.environ["FAULTS_LAUNCH"]), self.restarts]
        self.log(loaded=max(0, step), tier=tier, pid=os.getpid(), start=start, **more)

    def begins(self, step: int) -> None:
        with metrics.phase("train.step", step=step):
            pass

    def trained(self, step: int, loss: torch.Tensor | float, **more: Any) -> None:
        self.log(step=step, loss=float(loss).hex(), **more)
        self.settled()

    def settled(self) -> None:
        """A save that was pending has been copied: the optimizer has waited for it."""
        if self._pending:
            self.log(saved=self._pending)
            self._pending = 0

    def place(self, step: int) -> StorageType | None:
        """Where a step is to be saved, if it is."""
        if step % self.args.memory and step % self.args.disk:
            return None
        return StorageType.MEMORY if step % self.args.disk else StorageType.DISK

    def saved(self, step: int, result: SaveResult | None, **more: Any) -> None:
        if result is None:
            return
        if result.pending:
            self._pending = step
            self.log(pending=step, **more)
        elif result.saved:
            self.log(saved=step, **more)
        else:
            self.log(skipped=step, reason=result.reason, **more)
        if result.trouble:
            self.log(trouble=result.trouble)
        if "is being persisted" in result.reason:
            time.sleep(PAUSE)

    def waits(self, step: int) -> None:
        if step in self.args.wait_at:
            self.log(waiting=step)
            while not (self.args.out / f"go.{step}").exists():
                time.sleep(0.01)
        if 0 < self.args.stop_at <= step:
            self.log(waiting=step)
            time.sleep(600)

    def leaves(self, step: int) -> str:
        """The way in which this rank leaves after a step, if it does; all others wait until it has left."""
        if not self.args.leave or step != int(self.args.leave[1]):
            return ""
        rank, _, way = self.args.leave
        if int(rank) == self.rank:
            return str(way)
        log = self.args.out / f"log.{rank}"
        with suppress(ProcessLookupError):
            # All its threads have to end: until then its sockets are open, though its first thread is a zombie.
            process = os.pidfd_open(int((self.args.out / f"pid.{rank}").read_text()))
            while '"left"' not in log.read_text() and not select([process], [], [], 0.01)[0]:
                pass
            os.close(process)
        return ""

    def end(self, state: Any) -> None:
        (self.args.out / f"end.{self.rank}").write_text(digest(state))


class Training:
    """A model, and what saves it. Its constructor makes all but what is common."""

    model: Any
    trained: Any
    """The model, as it is called in a step."""
    optimizer: torch.optim.Optimizer
    checkpointer: Any
    needs_all = False
    """Whether all ranks have to call each save."""

    def __init__(self, run: Run) -> None:
        self.run, self.args, self.rank = run, run.args, run.rank
        self.world = dist.get_world_size()

    def resume(self) -> int:
        raise NotImplementedError

    @property
    def tier(self) -> str:
        return str(self.checkpointer.loaded_from)

    def advance(self, step: int) -> torch.Tensor:
        loss: torch.Tensor = self.trained(torch.randn(4, 7)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def save(self, step: int, place: StorageType) -> SaveResult | None:
        raise NotImplementedError

    def wait(self) -> None:
        self.checkpointer.wait_latest_checkpoint()

    def after(self, step: int) -> None:
        """Whatever else a step has."""

    def whole(self) -> Any:
        """What a checkpoint has, whatever the number of ranks is; the first rank has it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def close(self) -> None:
        self.checkpointer.close()


def local(node: Any) -> Any:
    """What this rank has of a state."""
    if isinstance(node, DTensor):
        return node.to_local()
    if isinstance(node, dict | list | tuple):
        return {key: local(each) for key, each in (node.items() if isinstance(node, dict) else enumerate(node))}
    return node


def keep(training: Training, step: int) -> None:
    whole = training.whole()
    if training.rank == 0:
        torch.save(whole, training.args.out / f"full.{step}")


def is_equal(training: Training, step: int) -> dict[str, bool]:
    """Whether what was loaded is what was saved, maybe by another number of ranks."""
    whole = training.whole()
    return {"equal": training.rank > 0 or digest(whole) == digest(torch.load(training.args.out / f"full.{step}"))}


def is_together(args: argparse.Namespace) -> bool:
    """Whether all ranks come to the end."""
    return args.leave is None or args.leave[2] == "closes"


def loop(training: Training) -> None:
    """Train to the last step, or until this rank leaves."""
    run, args, is_closed = training.run, training.args, False

    def end(*_: Any) -> None:
        run.trained(step, training.advance(step))
        run.saved(step, training.save(step, StorageType.MEMORY))
        sys.exit()

    if args.last_save:
        signal.signal(signal.SIGTERM, end)
    step = training.resume()
    run.resumed(step, training.tier, world=training.world, **(is_equal(training, step) if args.full and step else {}))
    while step < args.steps:
        if way := run.leaves(step):
            if way == "exits":
                os._exit(0)
            is_closed = True
            training.close()
            run.log(left=step)
            if way == "returns":
                return
        step += 1
        run.begins(step)
        run.trained(step, training.advance(step))
        place = run.place(step)
        if place and (not is_closed or training.needs_all):
            run.saved(step, training.save(step, place))
        if place and args.full:
            keep(training, step)
        if args.leave and step < int(args.leave[1]):
            dist.barrier()
        if args.wait and place is StorageType.DISK and not is_closed:
            training.wait()
        training.after(step)
        run.waits(step)
    if is_together(args):
        dist.barrier()
    run.end(local([training.whole(), torch.get_rng_state()]))
    training.close()


def main(kind: Callable[[Run], Training], args: argparse.Namespace) -> None:
    """Run a program: a training of this kind."""
    dist.init_process_group("gloo")
    loop(kind(Run(args, dist.get_rank())))
    # The model is gone by now: were it the last to hold the process group, its end would wait, with the GIL, for a
    # thread of gloo that may be waiting for the GIL.
    gc.collect()
    if is_together(args):
        dist.barrier()
        dist.destroy_process_group()
