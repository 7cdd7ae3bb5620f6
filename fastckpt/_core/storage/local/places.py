"""Moves and removes the directory of one checkpoint, also where it cannot be renamed, so that no crash tears it."""

import errno
import os
from pathlib import Path

from fastckpt._core.format.manifest import NAME
from fastckpt._core.io.direct import copy_file
from fastckpt._core.io.durable import move, remove, sync_directory, sync_tree, write_text
from fastckpt._core.io.modes import make_directory
from fastckpt._core.storage.local.layout import REMAINS, Layout
from fastckpt._core.storage.local.named_file import remove_with_draft


def relocate(layout: Layout, source: Path, target: Path) -> None:
    """Give a place another name, durably; after a crash it has the old one or the new one, or is whole under both.

    What came with the image of a container lies in a lower layer of its file system (overlayfs), where no directory
    can be renamed: it is copied, and the old one is dropped.
    """
    try:
        move(source, target)
    except OSError as error:
        if not is_unmovable(source, error):
            raise
        copy = layout.draft("tmp")
        try:
            _copy_tree(source, copy)
            sync_tree(copy)
            move(copy, target)
        except OSError:
            remove(copy)
            raise
        drop(layout, source, withdraw=False)


def drop(layout: Layout, place: Path, *, withdraw: bool = True) -> None:
    """Remove a place, but no file that a user named, unless it is due still; first it ceases to count, durably.

    Without ``withdraw`` what is due stays: another place has the same checkpoint.
    """
    dropped = layout.draft("dropped")
    try:
        move(place, dropped)
    except OSError as error:
        if not is_unmovable(place, error):
            raise
        if not os.path.lexists(place / NAME):
            remove_with_draft(layout, place)  # it never counted
            return
        dropped = take_apart(layout, place, "dropped")
    if remove_remains(layout, dropped):
        remove_with_draft(layout, dropped) if withdraw else remove(dropped)


def take_apart(layout: Layout, place: Path, kind: str) -> Path:
    """Have a place that cannot be renamed count no more; returns a private path of that kind, with its manifest.

    It is one rename: that of the manifest. Without it the files in the place are remains, since the private path
    says so.
    """
    record = layout.draft(kind)
    make_directory(record)
    write_text(record / REMAINS, str(place.relative_to(layout.root)))
    sync_directory(record)
    sync_directory(layout.private)
    (place / NAME).rename(record / NAME)
    for directory in (record, place):  # first where it is now: it must not be lost
        sync_directory(directory)
    return record


def put_back(record: Path, place: Path) -> None:
    """Undo `take_apart`, unless the place has another manifest by now."""
    if not os.path.lexists(place / NAME):
        move(record / NAME, place / NAME)
    remove(record)


def remove_remains(layout: Layout, record: Path) -> bool:
    """Remove what is left in the place that a private path was taken from; False if some of it stays."""
    place = layout.remains(record)
    if place is None:
        return True
    remove_with_draft(layout, place)
    if os.path.lexists(place):
        return False
    sync_directory(place.parent)
    return True


def clear_remains(layout: Layout, place: Path) -> None:
    """Remove what is left in a place, if one who died took it apart."""
    for record in layout.taken_apart():
        if layout.remains(record) == place:
            sync_remains(layout, record)
            remove_remains(layout, record)


def sync_remains(layout: Layout, record: Path) -> None:
    """Make it durable that remains have no manifest: one who took them apart may have died before."""
    if place := layout.remains(record):
        for directory in (record, place):
            sync_directory(directory)


def is_unmovable(place: Path, error: OSError) -> bool:
    """Whether this error says that a directory cannot be renamed on its own file system."""
    return error.errno == errno.EXDEV and place.is_dir() and not place.is_symlink()


def _copy_tree(source: Path, target: Path) -> None:
    make_directory(target)
    for child in sorted(source.iterdir()):
        copy = target / child.name
        if child.is_symlink():
            copy.symlink_to(child.readlink())
        elif child.is_dir():
            _copy_tree(child, copy)
        else:
            copy_file(child, copy)
