"""Files that a view leads to stay as they are while it is open, wherever the node keeps them."""

import os
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.arena import Arena, arena_path
from fastckpt._core.memory.copies_folder import CopiesFolder
from fastckpt._core.memory.held_saves import kept_place
from fastckpt._core.native.view import hold, read_json
from fastckpt.errors import BadCheckpoint


class Link:
    """A connection to a saver that counts what it is asked for."""

    def __init__(self, arena: Path) -> None:
        self.arena, self.pins = arena, 0

    def pin(self) -> list[Path]:
        self.pins += 1
        return []


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_copies_of_other_nodes_are_pinned_wherever_they_are_and_have_to_be_there(tmp_path: Path, is_on_disk: bool):
    arena = Arena.open(arena_path(os.environ["FASTCKPT_SHM_DIR"], str(tmp_path), 0), str(tmp_path))
    folder = CopiesFolder(arena.path, tmp_path if is_on_disk else None)
    folder.ensure()
    path = kept_place(folder.path, SaveId(1, 5), "token") / "__1_0.distcp"
    link = Link(arena.path)
    with pytest.raises(BadCheckpoint, match="made way"):
        hold(link, [path], SaveId(1, 5))  # type: ignore[arg-type]
    path.parent.mkdir(parents=True)
    path.write_bytes(b"shards")
    hold(link, [path], SaveId(1, 5))  # type: ignore[arg-type]
    assert link.pins == 2
    hold(link, [tmp_path / "on storage"], None)  # type: ignore[arg-type]
    assert link.pins == 2
    folder.close()
    arena.remove()


def test_json_that_is_not_what_is_saved_is_refused_by_its_true_path(tmp_path: Path):
    """Of a stranger's checkpoint; None is a pipe."""
    path, link = tmp_path / "shape.json", tmp_path / "link"
    link.symlink_to(path)
    for content in (b"", b"[" * 100_000, b"[]", b"\xff", b"{" + b" " * (2 << 20) + b"}", None):
        os.mkfifo(path) if content is None else path.write_bytes(content)
        with pytest.raises(BadCheckpoint, match=str(path)):
            read_json(link, lambda value: isinstance(value, dict))
        path.unlink()
    path.write_text('{"zero_stage": 1}')
    assert read_json(link, lambda value: isinstance(value, dict)) == {"zero_stage": 1}
