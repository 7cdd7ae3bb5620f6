"""Steps whose metrics one rank alone gives, in a job with a sharded model."""

from pathlib import Path

from tests.faults.jobs import run_forked

SCRIPT = """
import os, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from fastckpt import Checkpointer
from fastckpt.dcp import shard_plans
shard_plans.DEADLINE = 2.0
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
folder = os.path.join(os.environ["JOB_FOLDER"], "checkpoints")
results = []
with Checkpointer(folder, model=model, optimizer=optimizer, every=4) as checkpointer:
    for step in range(checkpointer.resume() + 1, 13):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        own = {"loss": 1.0 / step} if dist.get_rank() == 0 and step > 5 else None
        results.append(checkpointer.step(step, metrics=own))
if dist.get_rank() == 0:
    print("saved", [step for step, result in enumerate(results, 1) if result and result.saved])
    print("asked", [step for step, result in enumerate(results, 1) if result is not None])
dist.barrier()
dist.destroy_process_group()
"""


def test_metrics_on_one_rank_alone_are_named_and_delay_the_job_once(tmp_path: Path, forked_launchers: None) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=0")
    output = run_forked(tmp_path, *options, tmp_path / "train.py", JOB_FOLDER=str(tmp_path))
    assert output.count("step 6 was given metrics, but not on all ranks: it is not saved") == 1, output
    assert "asked [4, 6, 8, 12]" in output and "saved [4, 8, 12]" in output, output
