"""Jobs whose ranks have unlike states."""

from tests.faults.conftest import new_job  # noqa: F401 (a fixture)
