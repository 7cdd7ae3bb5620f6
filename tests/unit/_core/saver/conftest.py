"""Disks of a limited size."""

from tests.unit._core.memory.conftest import small_disk  # noqa: F401
