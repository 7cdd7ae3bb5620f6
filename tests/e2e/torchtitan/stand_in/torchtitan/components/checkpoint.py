"""The interface of torchtitan 0.3's CheckpointManager, as far as a subclass meets it; torchtitan is not installed."""

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp

MODEL = "model"


class CheckpointManager:
    @dataclass(kw_only=True, slots=True)
    class Config:
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        keep_latest_k: int = 10
        last_save_model_only: bool = True

    def __init__(self, config: Config, *, states: dict[str, Any], base_folder: str = "", **parts: Any) -> None:
        self.enable = config.enable
        if self.enable:
            assert config.keep_latest_k == 0 and not config.last_save_model_only
            self.folder, self.interval, self.states = os.path.join(base_folder, config.folder), config.interval, states

    def __del__(self) -> None:
        self.close()

    def load(self, step: int = -1) -> bool:
        return self.enable and self._load(step)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self.enable or not (last_step or curr_step % self.interval == 0):
            return False
        states = self._states_to_load(model_only=False)
        self.dcp_save(states, self._create_checkpoint_id(curr_step), "disabled", enable_garbage_collection=True)
        return True

    def close(self) -> None:
        if getattr(self, "enable", False):
            self._close()

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: str,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        return dcp.save(state_dict, checkpoint_id=checkpoint_id)

    def _load(self, step: int = -1) -> bool:
        return False

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        rest = {name: state for name, state in self.states.items() if name != MODEL}
        return self.states[MODEL].state_dict() | ({} if model_only else rest)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return os.path.join(folder or self.folder, f"step-{step}")

    def _close(self) -> None:
        pass
