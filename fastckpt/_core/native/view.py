"""A directory in which a framework finds the files of a checkpoint, wherever they are, as long as it is open."""

import json
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.raw import Raw
from fastckpt._core.io.regular_file import read_small
from fastckpt._core.memory import slots
from fastckpt._core.memory.copies_folder import roots_of
from fastckpt._core.memory.held_saves import KEPT
from fastckpt._core.resume.tiers import Files
from fastckpt.errors import BadCheckpoint


def hold(link: SaverClient, paths: Iterable[Path], save: SaveId | None) -> None:
    """Keep the slots in which these files are as they are, until the link releases them.

    Raises BadCheckpoint if one of them does not hold that save any more.
    """
    paths = list(paths)
    inside = [path.relative_to(link.arena) for path in paths if path.is_relative_to(link.arena)]
    # Files of other nodes are kept beside the slots, under the name of their save.
    held = {link.arena / path.parts[0] for path in inside if path.parts[0] != KEPT}
    kept = [path for path in paths if any(path.is_relative_to(root / KEPT) for root in roots_of(link.arena))]
    if held or kept:
        # Pinned first, then compared: a slot that holds that save now keeps it until the release.
        link.pin()
    if any(slots.read(slot).committed != save for slot in held) or not all(path.is_file() for path in kept):
        raise BadCheckpoint(f"{save} in memory has made way for a newer one; load again")


def make_view(link: SaverClient, name: str, files: Files) -> Path:
    """A directory of this rank alone with links to the files; in memory, beside the slots, and of that name."""
    place = _place(link)
    remove_view(link)
    link.arena.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it: its owner takes it as it is, if private
    place.mkdir(mode=0o700)
    (place / name).mkdir(mode=0o700)
    for file, path in files.items():
        entry = place / name / file
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Links, not copies: a framework's loader opens them as files, and reads shared memory through them.
        entry.symlink_to(path)
    return place / name


def remove_view(link: SaverClient) -> None:
    """Remove the last view of `make_view`, be it for a worker that died."""
    shutil.rmtree(_place(link), ignore_errors=True)


def read_json(path: Path, is_sound: Callable[[Any], bool]) -> Any:
    """The JSON value of a small file of a view; raises BadCheckpoint, with its true path, unless it is sound."""
    try:
        data = read_small(path, follow=True)
        value = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path.resolve()} cannot be read: {error}") from error
    if not is_sound(value):
        raise BadCheckpoint(f"{path.resolve()} is not what is saved there; it begins with {data[:200]!r}")
    return value


def written(folder: Path, but: Collection[str] = ()) -> dict[str, Raw]:
    """The files in a directory that have bytes, by their relative names."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: Raw(path.read_bytes(), may_end_with_spaces=path.suffix == ".json")
        for name, path in found.items()
        if name not in but and path.stat().st_size
    }


def _place(link: SaverClient) -> Path:
    return link.arena / f"view-{link.place.local_rank}"
