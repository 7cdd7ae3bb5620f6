"""Files that a writer which has closed lends to later saves of the others: its own part, as it was at its end."""

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from fastckpt._core.memory.records import make_folders

FOLDER = "lent"
"""Their directory in an arena."""


def place_of(arena: Path, name: str) -> Path:
    """Return the path for a lent file of this name; makes the directory. Raises OSError."""
    path = arena / FOLDER / name
    make_folders(arena, path.parent)
    return path


def borrow(arena: Path, slot: Path, files: Mapping[str, int]) -> None:
    """Copy lent files of these sizes (bytes) into a slot, each whole under its name or not at all.

    They are copied, not linked: the writer that comes after a restart fills its images in place.

    Raises:
        OSError: Memory is full, or the lent files are not there any more.
    """
    for name, size in files.items():
        path = slot / name
        temporary = path.with_name(f".lent-{secrets.token_hex(4)}")
        make_folders(arena, path.parent)
        try:
            shutil.copyfile(arena / FOLDER / name, temporary, follow_symlinks=False)
            temporary.chmod(0o600)
            if (found := temporary.lstat().st_size) != size:
                raise OSError(f"{name} has {found} bytes; {size} were lent")
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def forget(arena: Path) -> None:
    """Remove all that was lent: other writers have come."""
    shutil.rmtree(arena / FOLDER, ignore_errors=True)


def copy_into(path: Path, source: Path, size: int) -> bool:
    """Lend a slot's file; False if there is no file of that size any more. Raises OSError if memory is full."""
    try:
        found = source.lstat()
    except OSError:
        return False
    if found.st_size != size:
        return False
    shutil.copyfile(source, path, follow_symlinks=False)
    os.chmod(path, 0o600)  # noqa: PTH101
    return True
