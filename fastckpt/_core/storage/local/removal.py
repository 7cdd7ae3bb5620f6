"""Removes checkpoints, and what crashed writers left behind."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fastckpt._core.io.durable import move, remove, sync_directory
from fastckpt._core.storage.local.layout import ABANDONED, Layout
from fastckpt._core.storage.local.named_file import NamedFile, finish_of_earlier_versions, named_file, remove_with_draft
from fastckpt._core.storage.local.places import (
    drop,
    is_unmovable,
    put_back,
    relocate,
    remove_remains,
    sync_remains,
    take_apart,
)
from fastckpt._core.storage.local.scan import CheckpointReader, Scan
from fastckpt._core.storage.local.stored import Stored, read_manifest
from fastckpt.errors import BadCheckpoint

logger = logging.getLogger(__name__)


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
    _finish(layout, stored, deleted)


def _finish(layout: Layout, stored: Stored, deleted: Path) -> bool:
    """Remove a checkpoint that counts no more, and the file that the user named, if it is its own; whether all went."""
    files = replace(stored, place=layout.remains(deleted) or deleted)
    if stored.target and files.owns_target():
        stored.target.unlink(missing_ok=True)  # if it fails, `deleted` stays: the file must not be forgotten
        sync_directory(stored.target.parent)
    if not remove_remains(layout, deleted):
        return False
    remove_with_draft(layout, deleted)
    return True


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
    finish_of_earlier_versions(layout)
    scan = reader.scan()
    _sync_names(layout, scan)
    done = [*_put_named(layout, scan), *_finish_deletions(layout, reader)]
    for place in layout.drafts("dropped"):
        remove_remains(layout, place)  # what made way has to find its place free
    for stored in scan.stale:
        drop(layout, stored.place)
        done.append(stored.place)
    done += _settle_retired(layout, reader)
    for place in layout.drafts("tmp") + layout.drafts("dropped"):
        if layout.remains(place) is None:
            remove_with_draft(layout, place)
            done.append(place)
    return done


def sweep_abandoned(layout: Layout, reader: CheckpointReader) -> list[Path]:
    """Remove what writers began and left long ago, and what was replaced, where no locks tell who still writes.

    One that was only stopped finds its files gone, and writes them again. Nothing else changes its place.
    """
    _sync_names(layout, reader.scan())
    drafts = [place for place in layout.drafts("tmp") + layout.drafts("dropped") if layout.remains(place) is None]
    done = []
    for place in drafts:
        with suppress(FileNotFoundError):  # its writer is at work, and has just come to its end
            if layout.idle(place) > ABANDONED:
                remove_with_draft(layout, place)
                done.append(place)
    return done + list(_settle_retired(layout, reader, restores=False))


def _sync_names(layout: Layout, scan: Scan) -> None:
    """A writer may have died between a rename and its sync: what is removed now must not be needed after all."""
    # Where a file is due, its checkpoint's rename came last: without that name nothing would tell of the file. Then the
    # private one: what made way went there.
    due = [stored.place.parent for stored, _ in _due(layout, scan)]
    within = [layout.name_within(stored.id, stored.manifest.target) for stored in scan.places]
    targets = [
        (each.place if name else each.target or each.place).parent
        for each, name in zip(scan.places, within, strict=True)
    ]
    there = [directory for directory in targets if directory.is_dir()]  # users may remove theirs
    for directory in dict.fromkeys([*due, layout.private, layout.root, *there]):
        sync_directory(directory)
    for record in layout.taken_apart():
        sync_remains(layout, record)


def _put_named(layout: Layout, scan: Scan) -> Iterator[Path]:
    """Give files that users named the names that are due. First: another place of the same id would withdraw them."""
    for stored, named in _due(layout, scan):
        try:
            named.put()
        except OSError as error:  # say, a directory has the name now: the checkpoint counts without the file
            logger.warning("cannot put %s at %s: %s. The next sweep will try again.", stored.id, named.path, error)
        else:
            yield named.path


def _due(layout: Layout, scan: Scan) -> list[tuple[Stored, NamedFile]]:
    files = [(stored, named_file(layout, stored.id, stored.manifest.target)) for stored in scan.places]
    return [(stored, named) for stored, named in files if named and named.is_due]


def _finish_deletions(layout: Layout, reader: CheckpointReader) -> Iterator[Path]:
    for place in layout.drafts("deleted"):
        if stored := _read(reader, place):
            try:
                is_gone = _finish(layout, stored, place)
            except OSError as error:
                logger.warning(
                    "cannot remove %s of %s: %s. The next sweep will try again.", stored.target, place, error
                )
            else:
                yield from [place] * is_gone
        elif remove_remains(layout, place):
            remove(place)
            yield place


def _settle_retired(layout: Layout, reader: CheckpointReader, *, restores: bool = True) -> Iterator[Path]:
    """Drop what made way for a newer one, and put the others back, unless they may be on their way."""
    whole = {stored.place: stored.id for stored in reader.scan().places}
    retired = [stored for stored in (_read(reader, place) for place in layout.drafts("retired")) if stored]
    for stored in sorted(retired, key=lambda stored: stored.id, reverse=True):
        home = layout.home(stored.id, stored.manifest.target)
        if home in whole and whole[home] >= stored.id:
            drop(layout, stored.place)
            yield stored.place
            continue
        if not restores:
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
