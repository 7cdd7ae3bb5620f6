"""Groups of agents that end with their test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit._core.saver.peers.parity_group import SIZES, Group


@pytest.fixture
def group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(tmp_path, getattr(request, "param", SIZES))
    yield made
    for member in made.members.values():
        member.peers.close()
        member.parity.close()
