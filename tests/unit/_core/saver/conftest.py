"""Disks of a limited size, directories, and other jobs."""

from tests.unit._core.memory.conftest import small_disk  # noqa: F401
from tests.unit._core.saver.persistence.other_jobs import start  # noqa: F401
from tests.unit._core.storage.conftest import fast_path  # noqa: F401
