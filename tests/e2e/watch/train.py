"""Train in a folder until it has a file ``stop``; rank 1 is killed once if there is a file ``kill``."""

import math
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

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
metrics.log(0, {"before": 1 + rank})  # there is no checkpointer yet
checkpointer = DdpCheckpointer(folder / "run")
checkpointer.load_checkpoint()
step, goes_on = max(0, checkpointer.loaded_step), torch.ones(1)
while goes_on.item():
    step += 1
    loss = model(torch.ones(4)).sum()
    loss.backward()
    optimizer.step()
    metrics.log(step, {"loss": loss, "train/lr": 0.01, "bad": math.nan, "rank": rank})
    if step % 5 == 0:
        state = {"model": model.state_dict(), "step": step}
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK if step == 5 else StorageType.MEMORY)
    kill = folder / "kill"
    if rank == 1 and kill.exists():
        kill.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    goes_on.fill_(not (folder / "stop").exists())
    dist.all_reduce(goes_on, dist.ReduceOp.MIN)
checkpointer.close()
dist.destroy_process_group()
