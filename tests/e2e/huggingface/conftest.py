"""Jobs of transformers' Trainer, and runs that nothing befell to compare them with."""

from pathlib import Path

from tests.faults.conftest import new_job, reference_runs  # noqa: F401 (a fixture)

PROGRAM, STOCK = (str(Path(__file__).with_name(name)) for name in ("train.py", "stock.py"))
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "TQDM_DISABLE": "1"}
OPTIONS = {"program": PROGRAM, "FASTCKPT_PRELOAD": "auto", **ENVIRONMENT}


uninterrupted = reference_runs(STOCK, "--resume", "none", FASTCKPT_PRELOAD="auto", **ENVIRONMENT)
"""Of transformers' own Trainer."""
