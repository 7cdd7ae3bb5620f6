"""The training with DCP: FSDP2 whose state goes through dcp.save."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fastckpt.dcp import SaveResult, SharedMemoryReader, SharedMemoryWriter, StorageType
from tests.faults import training
from tests.faults.programs.fsdp import build, full_state
from tests.faults.training import Run, Training


class Dcp(Training):
    """All that is saved: sharded parameters and moments, a tensor that all ranks have, and a text that grows."""

    needs_all = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model = self.trained = build("fsdp2")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self._writer = SharedMemoryWriter(self.args.checkpoint_dir)
        self.checkpointer = SharedMemoryReader(self._writer)
        self._table, self._text = torch.zeros(1000), ""

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "table": self._table, "text": self._text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self._text = state["text"]

    def resume(self) -> int:
        if (step := self.checkpointer.find()) is not None:
            dcp.load({"app": self}, storage_reader=self.checkpointer)
            step = self.checkpointer.loaded_step
        return step or 0

    def advance(self, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        self._table += step
        self._text += "x" * 100
        return super().advance(step)

    def save(self, step: int, place: StorageType) -> SaveResult:
        self._writer.storage_type = place
        name = f"{self.args.checkpoint_dir}/checkpoint-{step}"
        dcp.save({"app": self}, storage_writer=self._writer, checkpoint_id=name)
        return self._writer.result

    def wait(self) -> None:
        self._writer.wait()

    def whole(self) -> Any:
        full = full_state(self.model, self.optimizer)
        return {**(full if self.rank == 0 else {}), "table": self._table, "text": self._text}

    def close(self) -> None:
        self._writer.close()


if __name__ == "__main__":
    training.main(Dcp, training.parser().parse_args())
