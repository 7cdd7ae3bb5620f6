"""The training whose checkpoints have a layout of its own, as those of frameworks do; ways: tags, split."""

import json
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fastckpt._core.native.folder_checkpointer import (
    CheckpointNames,
    FolderCheckpointer,
    Raw,
    RequiredFiles,
    SaveResult,
    StorageType,
    Tensors,
)
from fastckpt._core.snapshot.rng_state import restore_rng, rng_state
from tests.faults import training
from tests.faults.training import Run, Training

MODEL, STATE, OPTIMIZER = "model.safetensors", "state.json", "optimizer/first.pt"


class Folder(Training):
    tier = ""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(7)
        self.model = self.trained = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer.register_step_pre_hook(lambda *_: self._reduce())
        torch.manual_seed(11 + self.rank)
        self._own = f"random/{self.rank}.pt"
        self._is_split = self.args.way == "split"
        needed = RequiredFiles(STATE, self._own, (OPTIMIZER,) if self._is_split else ())
        self.checkpointer = FolderCheckpointer(self.args.checkpoint_dir, needed)

    def _reduce(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)

    def resume(self) -> int:
        found = self.checkpointer.find()
        if found is None:
            return 0
        self.tier = found.tier
        with found:
            self.model.load_state_dict(load_file(found.path / MODEL))
            self.optimizer.load_state_dict(torch.load(found.path / OPTIMIZER))
            restore_rng(torch.load(found.path / self._own))
            step = len(json.loads((found.path / STATE).read_text()))
        assert step == found.step
        return step

    def save(self, step: int, place: StorageType) -> SaveResult:
        """The first rank alone saves the optimizer, if it is split."""
        files: dict[str, Any] = {self._own: rng_state()}
        common = {
            MODEL: Tensors(self.model.state_dict(), {"format": "pt"}),
            STATE: Raw(json.dumps(["0" * 30] * step).encode(), may_end_with_spaces=True),
            OPTIMIZER: self.optimizer.state_dict(),
        }
        if self._is_split:
            alone = {OPTIMIZER: common.pop(OPTIMIZER)}
            files |= alone if self.rank == 0 else {}
        files |= common if self.checkpointer.writes_common else {}
        named = CheckpointNames(f"global_step{step}", "latest") if self.args.way == "tags" else CheckpointNames()
        return self.checkpointer.save_checkpoint(step, files, place, common=common, named=named)


if __name__ == "__main__":
    training.main(Folder, training.parser().parse_args())
