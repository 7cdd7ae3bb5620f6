"""Train until the job is stopped, 50 steps a second at most; rank 1 is killed once if there is a file ``kill``."""

import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from fastckpt import DdpCheckpointer, StorageType, metrics

# torch's optimizers import the compiler, which nothing here uses: a third of the time that a start takes.
sys.modules["torch._dynamo"] = torch._dynamo = MagicMock(disable=lambda function, *args, **kwargs: function)

folder = Path(os.environ["JOB_FOLDER"])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = DdpCheckpointer(folder / "run")
checkpointer.load_checkpoint()
step = max(0, checkpointer.loaded_step)
while True:
    step += 1
    loss = model(torch.ones(4)).sum()
    loss.backward()
    optimizer.step()
    metrics.log(step, {"loss": loss})
    if step % 5 == 0:
        state = {"model": model.state_dict(), "step": step}
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK if step == 5 else StorageType.MEMORY)
    kill = folder / "kill"
    if dist.get_rank() == 1 and kill.exists():
        kill.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
