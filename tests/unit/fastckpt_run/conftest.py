"""Remains of each test of the launcher's parts."""

from collections.abc import Iterator

import pytest

from fastckpt_run.shutdown import given_up


@pytest.fixture(autouse=True)
def nothing_given_up() -> Iterator[None]:
    """Calls of a store whose host a test has ended may wait yet: this process ends by itself all the same."""
    yield
    given_up.clear()
