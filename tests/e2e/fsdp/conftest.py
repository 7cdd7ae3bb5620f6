"""Jobs with sharded models."""

from tests.faults.conftest import new_job  # noqa: F401 (a fixture)
