"""Remains of each test of the launcher's parts, and the events that it sees."""

from collections.abc import Iterator
from typing import Any

import pytest

from fastckpt._core import metrics
from fastckpt_run.shutdown import given_up


@pytest.fixture(autouse=True)
def nothing_given_up() -> Iterator[None]:
    """Calls of a store whose host a test has ended may wait yet: this process ends by itself all the same."""
    yield
    given_up.clear()


@pytest.fixture
def events() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    metrics.listen(found.append)
    yield found
    metrics.unlisten(found.append)
