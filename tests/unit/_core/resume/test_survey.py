"""Memory of a node whose rank has changed: not resumed, but reported."""

import os
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import Arena, arena_path
from fastckpt._core.resume.survey import held_elsewhere


def test_memory_of_another_node_number_of_this_job_on_this_host_is_reported():
    """That of the third is of a directory that was removed since."""
    arenas = [Arena.open(arena_path(os.environ["FASTCKPT_SHM_DIR"], "/c", node), "/c") for node in range(3)]
    for arena, identity in zip(arenas, ("this", "this", "another"), strict=True):
        arena.claim_for(identity)
        arena.make_slots(1)
    own, other = arenas[0].path, arenas[1].path
    assert held_elsewhere(own, "/c") == []
    for arena in arenas:
        (slot,) = arena.slots
        (slot / "model.pt").write_bytes(b"x")
        slots.begin(slot, slots.SlotBegin(SaveId(1, 24), frozenset([0])))
        slots.commit(slot, 0, slots.SlotDone(SaveId(1, 24), {"model.pt": 1}, {}))
    (found,) = held_elsewhere(own, "/c")
    assert found.startswith(f"step 24 of history 1 in {other}")
    assert held_elsewhere(own, "/d") == held_elsewhere(Path("/nowhere/arena"), "/c") == []
    owner = other / "owner"
    owner.write_bytes(owner.read_bytes().replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 1'))
    assert held_elsewhere(own, "/c") == [], "of another job"
    for arena in arenas:
        arena.remove()
