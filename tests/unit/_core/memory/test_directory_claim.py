"""The directory that an arena belongs to: by the mark that was read, by the planned one, by the inode."""

import os
import signal
from pathlib import Path

from fastckpt._core.memory import directory_claim as claim_module
from fastckpt._core.memory.arena import Arena
from fastckpt._core.memory.directory_claim import DirectoryClaim
from tests.support.tables import for_each
from tests.unit._core.memory.conftest import killed


@for_each(
    (DirectoryClaim(seen="a", inode=1), "a", 1, True),
    (DirectoryClaim(seen="a", inode=1), "a", 2, True),  # moved to another disk
    (DirectoryClaim(seen="a", inode=1), "b", 1, False),
    (DirectoryClaim(seen="a", wanted="a", inode=1), "", 1, False),  # its user has emptied it
    (DirectoryClaim(wanted="a", inode=1), "", 1, True),  # it could not be marked
    (DirectoryClaim(wanted="a", inode=1), "", 2, False),  # created again before it could be
    (DirectoryClaim(wanted="a", inode=1), "a", 1, True),  # killed before it was noted
    (DirectoryClaim(wanted="a", inode=1), "b", 1, True),  # another node was first
    (DirectoryClaim(wanted="a", inode=1), "b", 2, False),
    (DirectoryClaim(wanted="a"), "b", 2, True),  # at a URL
    (DirectoryClaim(), "", 1, False),
    (DirectoryClaim(), "a", 1, False),
    (DirectoryClaim(unnamed=True), "", 1, True),  # an earlier version's
    (DirectoryClaim(unnamed=True), "a", 1, False),
)
def test_an_arena_belongs_to_the_directory_of_its_mark_or_inode(
    claim: DirectoryClaim, mark: str, inode: int, ours: bool
):
    assert claim.is_of(mark, inode) is ours


def test_an_arena_of_another_job_that_took_the_place_is_not_written_to(path: Path):
    arena = Arena.open(path, "/checkpoints")
    arena.claim_for("", 7)
    path.rename(path.with_name("aside"))
    other = Arena.open(path, "/checkpoints")
    other.claim_for("its own")
    arena.saw("ours")
    assert DirectoryClaim.read(path).seen == "its own" and arena.claim.seen == "ours"
    arena.release()
    other.remove()
    path.with_name("aside").rename(path)
    Arena.open(path, "/checkpoints").remove()


def test_a_claim_interrupted_at_any_file_operation_names_the_same_directory(path: Path, monkeypatch):
    """Before each file operation; what it held is the directory's either way."""
    arena = Arena.open(path, "/checkpoints")
    for invalid in ("", "[]", "{", '{"mark": 1, "inode": 2}', '{"mark": "a", "inode": -1}', "{}"):
        (path / "claim").write_text(invalid)
        assert DirectoryClaim.read(path) == DirectoryClaim()
    arena.claim_for("", 7)
    wanted = arena.claim.wanted
    for operation in ("write_record", "write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(claim_module, operation, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            killed(lambda: DirectoryClaim(wanted, wanted, 7).write(path))
        assert DirectoryClaim.read(path).is_of(wanted, 7) and DirectoryClaim.read(path).is_of("", 7)
    arena.remove()
