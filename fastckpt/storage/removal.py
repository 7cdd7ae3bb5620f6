"""Removes checkpoints, and what crashed writers left behind."""

from collections.abc import Iterator
from pathlib import Path

from fastckpt.errors import BadCheckpoint
from fastckpt.storage.claims import Claims, draft_of
from fastckpt.storage.durable import move, remove
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
        remove(stored.target)  # it is this checkpoint's own by the reader's rule, else this were not whole
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
        remove(place)
        yield place


def _owns_target(stored: Stored, scan: Scan) -> bool:
    rivals = [other for other in scan.places if other.target == stored.target]
    return stored in Claims().settle([*rivals, stored]).owners


def _settle_retired(layout: Layout, reader: Reader) -> Iterator[Path]:
    whole = {stored.place for stored in reader.scan().places}
    for place in layout.drafts("retired"):
        stored = _read(reader, place)
        home = layout.home(stored.manifest) if stored else None
        if home in whole:
            drop(layout, place)
            yield place
        elif home and not home.exists():
            move(place, home)
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
