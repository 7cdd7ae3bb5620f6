"""Groups of agents that end with their test."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit._core.saver.peers.parity_group import GROUP, SIZES, Group


@pytest.fixture
def medium(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Arenas in memory, or on the disk on which temporary files are."""
    in_memory = GROUP if getattr(request, "param", "memory") == "memory" else ()
    for id in in_memory:
        arena = Path(os.environ["FASTCKPT_SHM_DIR"], id)
        arena.mkdir()
        (tmp_path / id).symlink_to(arena)
    yield
    for id in in_memory:
        shutil.rmtree(Path(os.environ["FASTCKPT_SHM_DIR"], id))


@pytest.fixture
def group(tmp_path: Path, request: pytest.FixtureRequest, medium: None) -> Iterator[Group]:
    made = Group(tmp_path, getattr(request, "param", SIZES))
    yield made
    for member in made.members.values():
        member.peers.close()
        member.parity.close()
