"""The loop of accelerate's own examples, which leaves the epoch to the loader; logs what each step used.

Rank 1 is killed once, in the middle of the second epoch of three, if a third argument says so.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

from fastckpt.accelerate import AccelerateCheckpointer, StorageType

OUT, STATEFUL, DIES = Path(sys.argv[1]), sys.argv[2] == "stateful", len(sys.argv) > 3
OUT.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0, use_stateful_dataloader=STATEFUL)
accelerator = Accelerator(cpu=True, dataloader_config=config)
rank = accelerator.process_index
data = TensorDataset(torch.arange(40.0)[:, None])
loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator())
model = torch.nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-6), loader)
checkpointer = AccelerateCheckpointer(accelerator, OUT / "checkpoints")
step = checkpointer.load_state()
start, skip = divmod(step, 5)
for epoch in range(start, 3):
    first = epoch == start and skip and not STATEFUL
    for (batch,) in accelerator.skip_first_batches(loader, skip) if first else loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        with (OUT / f"used.{rank}").open("a") as file:
            print(epoch, step, *batch.flatten().int().tolist(), file=file)
        checkpointer.save_state(step, StorageType.MEMORY)
        if DIES and rank == 1 and step == 7 and not (OUT / "killed").exists():
            (OUT / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
accelerator.wait_for_everyone()
checkpointer.close()
accelerator.end_training()
