"""Jobs that may offload their activations."""

from pathlib import Path

from tests.faults.conftest import new_job, reference_runs  # noqa: F401 (a fixture)
from tests.support.offload_budget import budget_is_kept  # noqa: F401 (a fixture)

PROGRAM = str(Path(__file__).with_name("train.py"))

uninterrupted = reference_runs(PROGRAM, FASTCKPT_PRELOAD="auto")
