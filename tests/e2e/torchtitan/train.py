"""A job that saves with the manager of the page, on the interface of torchtitan; rank 1 is killed in step 7.

It ends with a training that nothing befell, in the same process: its weights are to be the same.
"""

import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).with_name("stand_in")))
from tests.docs.blocks import blocks_of
from tests.faults.diary import digest

STEPS, DIES_IN = 12, 7


def fast_checkpoint_manager() -> type:
    """Its class, of the module that docs/guides/torchtitan.md has a user write."""
    [block] = [block for block in blocks_of("docs/guides/torchtitan.md") if block.runs_in]
    module = sys.modules[block.file[:-3]] = types.ModuleType(block.file[:-3])
    exec(compile("\n" * block.line + block.code, block.page, "exec"), module.__dict__)
    return module.FastCheckpointManager


class Training:
    """As torchtitan's parts: entries of the model are in the state beside those of other names."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.step, self.module = 0, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        fully_shard(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), 0.05)

    @property
    def states(self) -> dict[str, Any]:
        of_optimizer = self.module, self.optimizer
        return {
            "model": Part(self.module.state_dict, lambda state: self.module.load_state_dict(state, strict=False)),
            "optimizer": Part(
                lambda: get_optimizer_state_dict(*of_optimizer),
                lambda state: set_optimizer_state_dict(*of_optimizer, state),
            ),
            "train_state": Part(
                lambda: {"step": torch.tensor(self.step)}, lambda state: setattr(self, "step", int(state["step"]))
            ),
        }

    def advance(self) -> None:
        self.module(torch.full((2, 8), self.step / 7)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def weights(self) -> str:
        return digest([each.to_local() for each in self.module.parameters()])


class Part:
    def __init__(self, state_dict: Any, load_state_dict: Any) -> None:
        self.state_dict, self.load_state_dict = state_dict, load_state_dict


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    training, rank, manager_type = Training(), dist.get_rank(), fast_checkpoint_manager()
    config = manager_type.Config(enable=True, interval=1, storage_interval=4)
    manager = manager_type(config, states=training.states, base_folder=folder)
    manager.load()
    print(f"rank {rank} goes on after step {training.step}", flush=True)
    while training.step < STEPS:
        if training.step + 1 == DIES_IN and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        training.advance()
        manager.save(training.step, last_step=training.step == STEPS)
    manager.close()
    undisturbed = Training()
    for _ in range(STEPS):
        undisturbed.advance()
    if training.weights() == undisturbed.weights():
        print(f"rank {rank} ends with the weights of a training that nothing befell", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
