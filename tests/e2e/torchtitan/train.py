"""A job that saves with the manager of the page, on the interface of torchtitan; ends with a digest of its weights."""

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).with_name("stand_in")))
from tests.e2e.torchtitan.manager import fast_checkpoint_manager

STEPS = 12


class Model:
    """As torchtitan's ModelWrapper: its entries are in the state beside those of other names."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return self._module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state, strict=False)


class Optimizer:
    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parts = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(*self._parts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(*self._parts, state)


class TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def main(folder: str, kill_at: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    fully_shard(module)
    optimizer, progress = torch.optim.AdamW(module.parameters(), 0.05), TrainState()
    states = {"model": Model(module), "optimizer": Optimizer(module, optimizer), "train_state": progress}
    manager_type = fast_checkpoint_manager()
    config = manager_type.Config(enable=True, interval=1, storage_interval=4)
    manager = manager_type(config, states=states, base_folder=folder)
    manager.load()
    print(f"rank {dist.get_rank()} goes on after step {progress.step}", flush=True)
    while progress.step < STEPS:
        if progress.step + 1 == kill_at and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        module(torch.full((2, 8), progress.step / 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        manager.save(progress.step, last_step=progress.step == STEPS)
    weights = hashlib.sha256(b"".join(each.to_local().detach().numpy().tobytes() for each in module.parameters()))
    print(f"rank {dist.get_rank()} ends with {weights.hexdigest()}", flush=True)
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
