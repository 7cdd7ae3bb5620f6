"""Removes checkpoints, and what crashed writers left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

from fastckpt.errors import BadCheckpoint
from fastckpt.storage.claims import Claims, draft_of
from fastckpt.storage.durable import move, remove, sync_directory
from fastckpt.storage.layout import FILES, Layout
from fastckpt.storage.scan import Reader, Scan
from fastckpt.storage.stored import Stored, read_manifest


def drop(layout: Layout, place: Path) -> None:
    """Remove a place, but no file that a user named; first it ceases to count, durably."""
    dropped = layout.draft("dropped")
    move(place, dropped)
    remove_with_draft(dropped)


def delete(layout: Layout, stored: Stored) -> None:
    """Remove a whole checkpoint; after a crash it counts as before, or `sweep` removes what is left of it.

    What another process publishes to its place meanwhile stays.
    """
    aside, deleted = layout.draft("retired"), layout.draft("deleted")
    try:
        stored.place.rename(aside)  # where it counts still, whichever it is
    except FileNotFoundError:
        return  # another process has deleted it
    if read_manifest(aside) != stored.manifest:
        if not os.path.lexists(stored.place):
            move(aside, stored.place)
        return
    move(aside, deleted)
    if stored.place.parent != layout.private:
        sync_directory(stored.place.parent)  # what loses its files must not come back under its old name
    if stored.target:
        # It is this checkpoint's own by the reader's rule, else this were not whole.
        stored.target.unlink(missing_ok=True)
        sync_directory(stored.target.parent)
    remove(deleted)


def sweep(layout: Layout, reader: Reader) -> list[Path]:
    """Finish what crashed writers began; call while nobody writes. Returns what was removed or restored."""
    scan = reader.scan()
    _sync_names(layout, scan)
    done = [*_finish_deletions(layout, reader)]
    for stored in scan.stale:
        drop(layout, stored.place)
        done.append(stored.place)
    for draft in filter(None, [draft_of(stored.place) for stored in scan.places]):
        remove(draft)  # its rename left both names
        done.append(draft)
    done += _settle_retired(layout, reader)
    for place in layout.drafts("tmp") + layout.drafts("dropped"):
        remove_with_draft(place)
        done.append(place)
    return done


def _sync_names(layout: Layout, scan: Scan) -> None:
    """A writer may have died between a rename and its sync: what is removed now must not be needed after all."""
    # The private one first: what made way went there.
    for directory in dict.fromkeys([layout.private, layout.root, *(stored.path.parent for stored in scan.places)]):
        sync_directory(directory)


def _finish_deletions(layout: Layout, reader: Reader) -> Iterator[Path]:
    for place in layout.drafts("deleted"):
        stored = _read(reader, place)
        if stored and stored.target and _owns_target(stored, reader.scan()):
            remove(stored.target)
            yield stored.target
            if stored.target.exists():
                continue  # it must not be forgotten before it is gone
            sync_directory(stored.target.parent)
        remove(place)
        yield place


def _owns_target(stored: Stored, scan: Scan) -> bool:
    rivals = [other for other in scan.places if other.target == stored.target]
    return stored in Claims().settle([*rivals, stored]).owners


def _settle_retired(layout: Layout, reader: Reader) -> Iterator[Path]:
    whole = {stored.place for stored in reader.scan().places}
    retired = [stored for stored in (_read(reader, place) for place in layout.drafts("retired")) if stored]
    for stored in sorted(retired, key=lambda stored: stored.id, reverse=True):
        home = layout.home(stored.id, stored.manifest.target)
        if home in whole:
            drop(layout, stored.place)
            yield stored.place
        elif not os.path.lexists(home):
            move(stored.place, home)
            whole.add(home)
            yield home


def _read(reader: Reader, place: Path) -> Stored | None:
    try:
        return reader.read(place)
    except BadCheckpoint:
        return None


def remove_with_draft(place: Path) -> None:
    """Remove a place that counts no more, or not yet, and the user's file that was being written for it."""
    draft = draft_of(place) or draft_of(place / FILES)
    if draft:
        remove(draft)
        sync_directory(draft.parent)
        if draft.exists():
            return  # only the place tells of it
    remove(place)
