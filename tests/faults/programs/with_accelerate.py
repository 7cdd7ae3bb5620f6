"""The training with accelerate: DDP, dropout, AdamW, a scheduler; ways: stateful, hooks, bin, named."""

from collections.abc import Iterator
from typing import Any

import torch

from fastckpt.accelerate import AccelerateCheckpointer, SaveResult, StorageType
from tests.e2e.accelerate.training import Training as Prepared
from tests.e2e.accelerate.training import advance, batches
from tests.faults import training
from tests.faults.training import Run, Training


class Accelerate(Training):
    """A loader of the way "stateful" has a state; else batches are skipped. With "hooks", these save weights."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._way = self.args.way
        self._prepared = Prepared(stateful=self._way == "stateful", hooks=self._way == "hooks")
        self._batches: Iterator[Any] = iter(())
        self.checkpointer = AccelerateCheckpointer(
            self._prepared.accelerator, self.args.checkpoint_dir, overlap=self.args.overlap
        )

    def resume(self) -> int:
        self.checkpointer.load_state()
        step = self._prepared.count.steps
        self._batches = batches(self._prepared, step, self._way == "stateful")
        return step

    def advance(self, step: int) -> torch.Tensor:
        return advance(self._prepared, *next(self._batches))

    def save(self, step: int, place: StorageType) -> SaveResult:
        name = f"step_{step}" if self._way == "named" else ""
        return self.checkpointer.save_state(step, place, name=name, safe_serialization=self._way != "bin")

    def whole(self) -> Any:
        return self._prepared.state()


if __name__ == "__main__":
    training.main(Accelerate, training.parser().parse_args())
