"""Jobs of the sharded training."""

from tests.faults.conftest import new_job  # noqa: F401 (a fixture)
from tests.faults.jobs import HERE

PROGRAM = str(HERE / "programs/fsdp.py")
