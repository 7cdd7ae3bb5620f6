"""Removes checkpoints, and what crashed writers left behind."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from fastckpt._core.storage.io.durable import move, remove, sync_directory
from fastckpt._core.storage.local.claims import Claims, draft_of
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.places import (
    drop,
    is_unmovable,
    put_back,
    relocate,
    remove_remains,
    remove_with_draft,
    sync_remains,
    take_apart,
)
from fastckpt._core.storage.local.scan import CheckpointReader, Scan
from fastckpt._core.storage.local.stored import Stored, read_manifest
from fastckpt.errors import BadCheckpoint


def delete(layout: Layout, stored: Stored, is_replaced: Callable[[], bool]) -> None:
    """Remove a whole checkpoint; after a crash it counts as before, or `sweep` removes what is left of it.

    What another process publishes to its place meanwhile stays. ``is_replaced`` is asked, when the checkpoint is out of
    its place, but counts still, whether a newer one counts: else it goes back.
    """
    try:
        deleted = _take_away(layout, stored, is_replaced)
    except FileNotFoundError:
        return  # another process has deleted it
    if deleted is None:
        return
    if stored.target:
        # It is this checkpoint's own by the reader's rule, else this were not whole.
        stored.target.unlink(missing_ok=True)
        sync_directory(stored.target.parent)
    if remove_remains(layout, deleted):
        remove(deleted)


def _take_away(layout: Layout, stored: Stored, is_replaced: Callable[[], bool]) -> Path | None:
    """Have a checkpoint count no more; returns where its manifest is, None if another one is in its place."""
    aside, deleted = layout.draft("retired"), layout.draft("deleted")
    try:
        stored.place.rename(aside)  # where it counts still, whichever it is
    except OSError as error:
        if not is_unmovable(stored.place, error):
            raise
        deleted = take_apart(layout, stored.place, "deleted")
        if read_manifest(deleted) == stored.manifest:
            return deleted
        put_back(deleted, stored.place)
        return None
    if read_manifest(aside) == stored.manifest and is_replaced():
        move(aside, deleted)
        if stored.place.parent != layout.private:
            sync_directory(stored.place.parent)  # what loses its files must not come back under its old name
        return deleted
    if not os.path.lexists(stored.place):
        move(aside, stored.place)
    return None


def sweep(layout: Layout, reader: CheckpointReader) -> list[Path]:
    """Finish what crashed writers began; call while nobody writes. Returns what was removed or restored."""
    scan = reader.scan()
    _sync_names(layout, scan)
    done = [*_finish_deletions(layout, reader)]
    for place in layout.drafts("dropped"):
        remove_remains(layout, place)  # what made way has to find its place free
    for stored in scan.stale:
        drop(layout, stored.place)
        done.append(stored.place)
    for draft in filter(None, [draft_of(stored.place) for stored in scan.places]):
        remove(draft)  # its rename left both names
        done.append(draft)
    done += _settle_retired(layout, reader)
    for place in layout.drafts("tmp") + layout.drafts("dropped"):
        if layout.remains(place) is None:
            remove_with_draft(place)
            done.append(place)
    return done


def _sync_names(layout: Layout, scan: Scan) -> None:
    """A writer may have died between a rename and its sync: what is removed now must not be needed after all."""
    # The private one first: what made way went there.
    for directory in dict.fromkeys([layout.private, layout.root, *(stored.path.parent for stored in scan.places)]):
        sync_directory(directory)
    for record in layout.taken_apart():
        sync_remains(layout, record)


def _finish_deletions(layout: Layout, reader: CheckpointReader) -> Iterator[Path]:
    for place in layout.drafts("deleted"):
        stored = _read(reader, place)
        if stored and stored.target and _owns_target(stored, reader.scan()):
            remove(stored.target)
            yield stored.target
            if stored.target.exists():
                continue  # it must not be forgotten before it is gone
            sync_directory(stored.target.parent)
        if remove_remains(layout, place):
            remove(place)
            yield place


def _owns_target(stored: Stored, scan: Scan) -> bool:
    rivals = [other for other in scan.places if other.target == stored.target]
    return stored in Claims().settle([*rivals, stored]).owners


def _settle_retired(layout: Layout, reader: CheckpointReader) -> Iterator[Path]:
    whole = {stored.place: stored.id for stored in reader.scan().places}
    retired = [stored for stored in (_read(reader, place) for place in layout.drafts("retired")) if stored]
    for stored in sorted(retired, key=lambda stored: stored.id, reverse=True):
        home = layout.home(stored.id, stored.manifest.target)
        if home in whole and whole[home] >= stored.id:
            drop(layout, stored.place)
            yield stored.place
            continue
        if home in whole:  # an older one took its place: whoever published that had not seen it
            drop(layout, home)
        if not os.path.lexists(home):
            relocate(layout, stored.place, home)
            whole[home] = stored.id
            yield home


def _read(reader: CheckpointReader, place: Path) -> Stored | None:
    try:
        return reader.read(place)
    except BadCheckpoint:
        return None
