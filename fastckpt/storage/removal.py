"""Removes checkpoints, and what crashed writers left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

from fastckpt.errors import BadCheckpoint
from fastckpt.storage.claims import Claims, draft_of
from fastckpt.storage.durable import move, remove, sync_directory
from fastckpt.storage.layout import Layout
from fastckpt.storage.scan import Reader, Scan
from fastckpt.storage.stored import Stored


def drop(layout: Layout, place: Path) -> None:
    """Remove a place, but no file that a user named; first it ceases to count, durably."""
    dropped = layout.draft("dropped")
    move(place, dropped)
    _remove_with_draft(dropped)


def delete(layout: Layout, stored: Stored) -> None:
    """Remove a whole checkpoint; after a crash it counts as before, or `sweep` removes what is left of it."""
    deleted = layout.draft("deleted")
    move(stored.place, deleted)
    if stored.target:
        # It is this checkpoint's own by the reader's rule, else this were not whole.
        stored.target.unlink(missing_ok=True)
        sync_directory(stored.target.parent)
    remove(deleted)


def sweep(layout: Layout, reader: Reader) -> list[Path]:
    """Finish what crashed writers began; call while nobody writes. Returns what was removed or restored."""
    done = [*_finish_deletions(layout, reader)]
    for stored in reader.scan().stale:
        drop(layout, stored.place)
        done.append(stored.place)
    done += _settle_retired(layout, reader)
    for place in layout.drafts("tmp") + layout.drafts("dropped"):
        _remove_with_draft(place)
        done.append(place)
    return done


def _finish_deletions(layout: Layout, reader: Reader) -> Iterator[Path]:
    for place in layout.drafts("deleted"):
        stored = _read(reader, place)
        if stored and stored.target and _owns_target(stored, reader.scan()):
            remove(stored.target)
            yield stored.target
            if stored.target.exists():
                continue  # it must not be forgotten before it is gone
        remove(place)
        yield place


def _owns_target(stored: Stored, scan: Scan) -> bool:
    rivals = [other for other in scan.places if other.target == stored.target]
    return stored in Claims().settle([*rivals, stored]).owners


def _settle_retired(layout: Layout, reader: Reader) -> Iterator[Path]:
    whole = {stored.place for stored in reader.scan().places}
    retired = [stored for stored in (_read(reader, place) for place in layout.drafts("retired")) if stored]
    for stored in sorted(retired, key=lambda stored: stored.id, reverse=True):
        home = layout.home(stored.manifest)
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


def _remove_with_draft(place: Path) -> None:
    draft = draft_of(place)  # first, since only the place tells of it
    if draft:
        remove(draft)
    remove(place)
