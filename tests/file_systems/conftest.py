"""Fixtures: mounts that end after the jobs that use them, and jobs of the training under faults."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.faults.conftest import new_job, uninterrupted  # noqa: F401


@pytest.fixture
def mounting() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
