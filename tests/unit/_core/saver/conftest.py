"""Disks of a limited size, and programs that are forks."""

from tests.unit._core.client.forked_programs import forks_if_possible  # noqa: F401
from tests.unit._core.memory.conftest import small_disk  # noqa: F401
