"""Steps whose metrics one rank alone gives, in a job with a sharded model."""

from tests.e2e.launcher.conftest import Jobs, forked_launchers, jobs  # noqa: F401 (fixtures)

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


def test_metrics_on_one_rank_alone_are_named_and_delay_the_job_once(jobs: Jobs) -> None:  # noqa: F811
    (jobs.folder / "train.py").write_text(SCRIPT)
    agent = jobs.start("--standalone", "--nproc-per-node=2", "train.py")
    output, errors = agent.communicate(timeout=200)
    assert agent.returncode == 0, errors
    assert errors.count("step 6 was given metrics, but not on all ranks: it is not saved") == 1, errors
    assert "asked [4, 6, 8, 12]" in output and "saved [4, 8, 12]" in output, output
