"""Jobs of the sharded training, and runs that nothing befell to compare them with."""

from tests.faults.conftest import new_job, reference_runs  # noqa: F401 (a fixture)
from tests.faults.jobs import HERE

PROGRAM = str(HERE / "programs/fsdp.py")


uninterrupted = reference_runs(PROGRAM, FASTCKPT_PRELOAD="auto")
