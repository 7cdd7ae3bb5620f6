"""Moves and removes the directory of one checkpoint, also where it cannot be renamed, so that no crash tears it."""

import errno
import logging
from pathlib import Path

from fastckpt._core.format.manifest import NAME, Manifest
from fastckpt._core.io.direct import copy_file
from fastckpt._core.policy.lineage import passed_over
from fastckpt._core.storage.local.layout import APART, Layout

logger = logging.getLogger("fastckpt")


def relocate(layout: Layout, source: Path, target: Path) -> None:
    """Give a place another name, durably; after a crash it has the old one or the new one, or is whole under both.

    A directory from the image of a container is in a lower layer of its file system (overlayfs). It cannot be renamed:
    it is copied, and the old one is dropped.
    """
    try:
        layout.files.move(source, target)
    except OSError as error:
        if not is_unmovable(layout, source, error):
            raise
        copy = layout.draft("tmp")
        try:
            _copy_tree(layout, source, copy)
            layout.files.sync_tree(copy)
            layout.files.move(copy, target)
        except OSError:
            layout.files.remove(copy)
            raise
        drop(layout, source)


def make_room(layout: Layout, place: Path, old: Manifest, new: Manifest) -> None:
    """Remove a replaced checkpoint; one that the new one's history passed over is kept beside it."""
    if old.id not in passed_over(new.details):
        drop(layout, place)
        return
    aside = layout.aside(layout.home(old.id, old.target))
    relocate(layout, place, aside)
    logger.warning(
        "%s was passed over at a resume, and is kept: moved it to %s, since %s takes its place", old.id, aside, new.id
    )


def drop(layout: Layout, place: Path) -> None:
    """Remove a place, but no file that a user named; first it ceases to count, durably."""
    dropped = layout.draft("dropped")
    try:
        layout.files.move(place, dropped)
    except OSError as error:
        if not is_unmovable(layout, place, error):
            raise
        if layout.files.exists(place / NAME):
            take_apart(layout, place, "dropped")
        remove_apart(layout, place)
    else:
        layout.files.remove(dropped)


def take_apart(layout: Layout, place: Path, kind: str) -> None:
    """Have a place that cannot be renamed count no more, by one rename: that of its manifest."""
    layout.files.move(place / NAME, place / APART[kind])


def put_back(layout: Layout, place: Path) -> None:
    """Undo `take_apart`, unless the place has another manifest by now."""
    name = layout.apart(place)
    if name:
        layout.files.move(place / name, place / NAME)


def remove_apart(layout: Layout, place: Path) -> bool:
    """Remove the rest of a place that counts no more; False if some of it stays."""
    for entry in layout.files.entries(place):
        if entry.name not in APART.values():
            layout.files.remove(place / entry.name)
    if any(entry.name not in APART.values() for entry in layout.files.entries(place)):
        return False
    # Its manifest goes last: without it the rest would look like a checkpoint that lost its own.
    layout.files.sync(place)
    layout.files.remove(place)
    return not layout.files.exists(place)


def is_unmovable(layout: Layout, place: Path, error: OSError) -> bool:
    """Return whether this error means that a directory cannot be renamed on its own file system."""
    return error.errno == errno.EXDEV and layout.files.is_directory(place)


def _copy_tree(layout: Layout, source: Path, target: Path) -> None:
    layout.files.make_directory(target)
    for child in layout.files.entries(source):
        copy = target / child.name
        if child.is_directory:
            _copy_tree(layout, source / child.name, copy)
        elif not layout.files.copy_link(source / child.name, copy):
            copy_file(source / child.name, copy, files=layout.files)
