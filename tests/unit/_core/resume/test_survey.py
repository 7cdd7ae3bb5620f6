"""Memory of a node whose rank has changed: not resumed, but reported."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import Arena, arena_path
from fastckpt._core.resume.survey import held_elsewhere


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    """For three nodes of this host; that of the third is of a directory that was removed since."""
    made = [Arena.open(arena_path(os.environ["FASTCKPT_SHM_DIR"], "/c", node), "/c") for node in range(3)]
    for arena, identity in zip(made, ("this", "this", "another"), strict=True):
        arena.claim_for(identity)
        arena.make_slots(1)
    yield made
    for arena in made:
        arena.remove()


def hold(arena: Arena, save: SaveId) -> None:
    (slot,) = arena.slots
    (slot / "model.pt").write_bytes(b"x")
    slots.begin(slot, slots.SlotBegin(save, frozenset([0])))
    slots.commit(slot, 0, slots.SlotDone(save, {"model.pt": 1}, {}))


def test_memory_of_another_node_number_on_this_host_is_reported(arenas: list[Arena]):
    assert held_elsewhere(arenas[0].path, "/c") == []
    for arena in arenas:
        hold(arena, SaveId(1, 24))
    (found,) = held_elsewhere(arenas[0].path, "/c")
    assert found.startswith(f"step 24 of history 1 in {arenas[1].path}")
    assert held_elsewhere(arenas[0].path, "/d") == held_elsewhere(Path("/nowhere/arena"), "/c") == []


def test_memory_of_another_job_is_not_reported(arenas: list[Arena]):
    hold(arenas[1], SaveId(1, 24))
    owner = arenas[1].path / "owner"
    owner.write_bytes(owner.read_bytes().replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 1'))
    assert held_elsewhere(arenas[0].path, "/c") == []
