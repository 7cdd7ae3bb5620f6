"""Jobs of transformers' Trainer, and runs that nothing befell to compare them with."""

from pathlib import Path

from tests.faults.conftest import new_job, reference_runs  # noqa: F401 (a fixture)
from tests.faults.jobs import Job

PROGRAM, STOCK = (str(Path(__file__).with_name(name)) for name in ("train.py", "stock.py"))
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "TQDM_DISABLE": "1"}
OPTIONS = {"program": PROGRAM, "FASTCKPT_PRELOAD": "auto", **ENVIRONMENT}


def run_stock(job: Job, *script: str, ranks: int = 2) -> Job:
    """Have torchrun run transformers' own Trainer."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return job.run(*script, launcher=launcher, program=STOCK, **ENVIRONMENT)


uninterrupted = reference_runs(STOCK, "--resume", "none", FASTCKPT_PRELOAD="auto", **ENVIRONMENT)
"""Of transformers' own Trainer."""
