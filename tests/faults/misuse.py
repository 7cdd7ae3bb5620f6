"""A worker that makes mistakes; what came of each is a line of ``<out>/<name>.<rank>``: a result's reason, or an error.

It asserts that after each of them the next save works.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from fastckpt.ddp import DdpCheckpointer, SaveResult, StorageType

OUT, DIRECTORY = Path(sys.argv[2]), sys.argv[4]  # as train.py has them


class Opaque:
    """An object whose property raises while it is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}

    @property
    def value(self) -> int:
        raise ZeroDivisionError("the user's own error")


class Subclass(torch.Tensor):
    """A tensor that refuses to be pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("the tensor's own error")


class Asking(Dataset):
    """Calls a function of the checkpointer in a forked DataLoader worker."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return outcome_of(self._ask)


def outcome_of(act: Callable[[], object]) -> str:
    try:
        result = act()
    except Exception as error:
        lines = traceback.format_exception_only(error)
        return "".join(lines).strip().replace("\n", " | ")
    return (result.reason or "saved") if isinstance(result, SaveResult) else str(result)


class Worker:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.checkpointer = DdpCheckpointer(DIRECTORY)
        self.step = 0

    def save(self, step: int, extra: Any = None, storage: StorageType = StorageType.MEMORY) -> SaveResult:
        state = {"weights": torch.full((1000,), float(step)), "layers": [{"extra": extra}]}
        return self.checkpointer.save_checkpoint(step, state, storage_type=storage)

    def try_to(self, name: str, act: Callable[[], object]) -> None:
        (OUT / f"{name}.{self.rank}").write_text(outcome_of(act))
        dist.barrier()
        self.step += 10
        assert self.save(self.step), f"the save after {name}"
        dist.barrier()

    def run(self) -> None:
        self.try_to("nothing", lambda: self.save(1))
        mistakes = {
            "property": Opaque(),
            "lock": threading.Lock(),
            "lambda": lambda: 0,
            "generator": (x for x in ()),
            "tensor": torch.ones(3).as_subclass(Subclass),
        }
        for name, mistake in mistakes.items():
            self.try_to(name, lambda mistake=mistake: self.save(self.step + 1, mistake))
        self.try_to("smaller", lambda: self.save(self.step - 1))
        self.try_to("twice", lambda: self.save(self.step))
        self.try_to("twice-to-disk", lambda: self.save(self.step, storage=StorageType.DISK))
        self.checkpointer.wait_latest_checkpoint()  # else what is being persisted, and the half save, leave no slot
        self.try_to("one-rank", lambda: self.save(self.step + 1) if self.rank == 1 else "nothing")
        for name in ("save", "load", "wait", "prepare"):
            self.try_to(f"forked-{name}", lambda name=name: self.in_a_loader(name))
        loaded = self.checkpointer.load_checkpoint()
        assert loaded["weights"][0] == self.step == self.checkpointer.loaded_step
        self.checkpointer.close()
        for name in ("save", "load", "wait", "prepare"):
            (OUT / f"closed-{name}.{self.rank}").write_text(outcome_of(self.deeds()[name]))
        self.checkpointer.close()

    def deeds(self) -> dict[str, Callable[[], object]]:
        return {
            "save": lambda: self.save(self.step + 1),
            "load": self.checkpointer.load_checkpoint,
            "wait": self.checkpointer.wait_latest_checkpoint,
            "prepare": lambda: self.checkpointer.prepare({"weights": torch.ones(3)}),
        }

    def in_a_loader(self, name: str) -> str:
        loader = DataLoader(Asking(self.deeds()[name]), num_workers=1, multiprocessing_context="fork")
        return next(iter(loader))[0]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    (OUT / f"pid.{dist.get_rank()}").write_text(str(os.getpid()))
    Worker().run()
    dist.barrier()
    dist.destroy_process_group()
