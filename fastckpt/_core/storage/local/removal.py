"""Removes checkpoints, and files that crashed writers left behind."""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fastckpt._core.format.manifest import NAME
from fastckpt._core.storage.local.layout import ABANDONED, APART, Layout
from fastckpt._core.storage.local.named_file import remove_named
from fastckpt._core.storage.local.places import (
    drop,
    is_unmovable,
    make_room,
    put_back,
    relocate,
    remove_apart,
    take_apart,
)
from fastckpt._core.storage.local.scan import CheckpointReader
from fastckpt._core.storage.local.stored import Stored, read_manifest
from fastckpt.errors import BadCheckpoint

logger = logging.getLogger(__name__)


def delete(layout: Layout, stored: Stored, is_replaced: Callable[[], bool]) -> None:
    """Remove a whole checkpoint; after a crash it counts as before, or `sweep` removes the rest of it.

    A checkpoint that another process publishes to its place meanwhile stays. ``is_replaced`` is called when the
    checkpoint is out of its place, but counts still: if no newer one counts, it goes back.
    """
    if not layout.files.is_directory(stored.place):
        _unlink(layout, stored, is_replaced)
        return
    try:
        deleted = _take_away(layout, stored, is_replaced)
    except FileNotFoundError:
        return  # another process has deleted it
    if deleted is not None:
        _finish(layout, Stored(stored.manifest, deleted, stored.target))


def _unlink(layout: Layout, stored: Stored, is_replaced: Callable[[], bool]) -> None:
    """Remove the link by which a checkpoint counts that was moved elsewhere; it stays there."""
    if read_manifest(stored.place) == stored.manifest and is_replaced():
        layout.files.unlink(stored.place)
        layout.files.sync(stored.place.parent)


def _finish(layout: Layout, deleted: Stored) -> bool:
    """Remove a checkpoint that counts no more, and the file that its user named; whether all went."""
    remove_named(layout, deleted)  # if it fails, the checkpoint stays: the file must not be forgotten
    if deleted.place.parent == layout.private:
        layout.files.remove(deleted.place)
        return True
    return remove_apart(layout, deleted.place)


def _take_away(layout: Layout, stored: Stored, is_replaced: Callable[[], bool]) -> Path | None:
    """Have a checkpoint count no more; returns where its files are, None if another one is in its place."""
    aside, deleted = layout.draft("retired"), layout.draft("deleted")
    try:
        layout.files.rename(stored.place, aside)  # where it counts still, whichever it is
    except OSError as error:
        if not is_unmovable(layout, stored.place, error):
            raise
        take_apart(layout, stored.place, "deleted")
        if read_manifest(stored.place, APART["deleted"]) == stored.manifest:
            return stored.place
        put_back(layout, stored.place)
        return None
    if read_manifest(aside) == stored.manifest and is_replaced():
        layout.files.move(aside, deleted)
        if stored.place.parent != layout.private:
            layout.files.sync(stored.place.parent)  # one that loses its files must not come back under its old name
        return deleted
    if not layout.files.exists(stored.place):
        layout.files.move(aside, stored.place)
    return None


def sweep(layout: Layout, reader: CheckpointReader) -> list[Path]:
    """Finish the work of crashed writers; call while nobody writes. Returns the removed or restored places."""
    _sync_names(layout)
    done = list(_finish_deletions(layout, reader))
    for stored in reader.scan().stale:
        drop(layout, stored.place)
        done.append(stored.place)
    done += _settle_retired(layout, reader)
    for place in layout.drafts("tmp") + layout.drafts("dropped"):
        layout.files.remove(place)
        done.append(place)
    return done


def sweep_abandoned(layout: Layout, reader: CheckpointReader) -> list[Path]:
    """Remove drafts that are long untouched, and replaced checkpoints, where no locks show who still writes.

    A writer that was only stopped finds its files gone, and writes them again. Nothing else changes its place.
    """
    _sync_names(layout)
    done = []
    for place in layout.drafts("tmp") + layout.drafts("dropped"):
        with suppress(FileNotFoundError):  # its writer is at work, and has just come to its end
            if layout.idle(place) > ABANDONED:
                layout.files.remove(place)
                done.append(place)
    return done + list(_settle_retired(layout, reader, restores=False))


def _sync_names(layout: Layout) -> None:
    """A writer may have died between a rename and its sync: files that are removed now must not be needed later."""
    # The private one first: retired checkpoints went there. Then where manifests were renamed within their places.
    for directory in (layout.private, layout.root, *layout.taken_apart()):
        layout.files.sync(directory)


def _finish_deletions(layout: Layout, reader: CheckpointReader) -> Iterator[Path]:
    """Remove places that count no more: a retired checkpoint has to find its place free."""
    for place in [*layout.drafts("deleted"), *layout.taken_apart()]:
        name = layout.apart(place)
        try:
            if name != APART["dropped"] and (stored := _read(reader, place, name or NAME)):
                is_gone = _finish(layout, stored)
            elif name:
                is_gone = remove_apart(layout, place)
            else:
                layout.files.remove(place)
                is_gone = True
        except OSError as error:
            logger.warning("cannot remove %s: %s. The next sweep will try again.", place, error)
        else:
            yield from [place] * is_gone


def _settle_retired(layout: Layout, reader: CheckpointReader, *, restores: bool = True) -> Iterator[Path]:
    """Drop retired checkpoints that a newer one replaced, and put the others back, unless they may be on their way."""
    whole = {stored.place: stored for stored in reader.scan().places}
    retired = [stored for stored in (_read(reader, place) for place in layout.drafts("retired")) if stored]
    for stored in sorted(retired, key=lambda stored: stored.id, reverse=True):
        home = layout.home(stored.id, stored.manifest.target)
        if home in whole and whole[home].id >= stored.id:
            make_room(layout, stored.place, stored.manifest, whole[home].manifest)
            yield stored.place
            continue
        if not restores:
            continue
        if home in whole:  # an older one took its place: its publisher had not seen this one
            drop(layout, home)
        layout.files.remove_empty(home)  # of one that was taken apart
        if not layout.files.exists(home):
            relocate(layout, stored.place, home)
            whole[home] = stored
            yield home


def _read(reader: CheckpointReader, place: Path, name: str = NAME) -> Stored | None:
    try:
        return reader.read(place, name)
    except BadCheckpoint:
        return None
