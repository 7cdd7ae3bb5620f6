"""The reader's rule: finds the checkpoints of a directory that count."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import NAME
from fastckpt._core.storage.local.known_checkpoints import KnownCheckpoints, stamp_of
from fastckpt._core.storage.local.layout import Contents, Layout
from fastckpt._core.storage.local.quarantine import reason
from fastckpt._core.storage.local.stored import Stored, read_manifest
from fastckpt.errors import BadCheckpoint, NewerFormat, PersistError

ATTEMPTS = 20
LOOKED_AT = 16
"""Number of newest checkpoints that `CheckpointReader.known` looks at each time."""


@dataclass(frozen=True)
class Scan:
    """Contents of a directory after a scan.

    Attributes:
        places: Every checkpoint with all files of its manifest, newest id first. An id has several places if it was
            saved to several paths, or if a crash came between its second publication and the end of its first.
        damaged: Places that are no whole checkpoints, and why.
        stale: Checkpoints that count no more, since a newer one has the path that their user named.
        quarantined: Quarantined places, and why.
        gathered: Checkpoints of which some nodes have made their part, but not all; or nobody has published them.
    """

    places: list[Stored]
    damaged: list[tuple[Path, str]]
    stale: list[Stored]
    quarantined: list[tuple[Path, str]] = field(default_factory=list)
    gathered: list[SaveId] = field(default_factory=list)

    @cached_property
    def whole(self) -> list[Stored]:
        """One place for each checkpoint that counts, newest first: as many ranks as saved it could resume it."""
        return [stored for stored in self.distinct if not stored.missing]

    @cached_property
    def distinct(self) -> list[Stored]:
        """One place for each id, newest first; one that lacks files of some ranks can serve only fewer ranks."""
        return list({stored.id: stored for stored in reversed(self.places)}.values())[::-1]


class CheckpointReader:
    """Finds the checkpoints of a directory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known = KnownCheckpoints(self.read)

    def known(self) -> Scan:
        """Return the same as `scan`, by one listing: it looks only at new checkpoints and at the newest ones.

        The others are assumed to be as they were found. Callers must tolerate that one has lost files since.
        """
        contents, found, is_new = self._layout.contents(), list[Stored](), set[Path]()
        with _Denied(found) as denied:
            for place in contents.places:
                stored = self._known.whole(place, contents.inodes[place])
                if stored is None:
                    is_new.add(place)
                    with suppress(BadCheckpoint), denied.at(place):
                        stored = self._known.read(place, contents.inodes[place])
                found += [stored] if stored else []
        found.sort(key=lambda stored: stored.id, reverse=True)
        # Until so many were seen to be whole: deletions rely on these, not on checkpoints that once were whole.
        whole, seen, is_replaced = list[Stored](), 0, False
        for stored in found:
            if seen < LOOKED_AT or stored.place in is_new:
                inode = contents.inodes[stored.place]
                if not self._is_whole(stored, inode):
                    is_replaced |= self._known.same(stored.place, inode) not in (None, stored)
                    continue
                seen += not stored.missing
            whole.append(stored)
        self._known.forget_others({*contents.places})
        if is_replaced:  # in a directory that has got the inode of one that was removed: it is known now
            return self.known()
        return _scan_of(whole, [], contents)

    def with_target(self, target: str) -> list[Stored]:
        """Return the saves to a path that its user named, whole or not, by one listing and the new manifests."""
        contents, found = self._layout.contents(), list[Stored | None]()
        for place in contents.places:
            with suppress(BadCheckpoint, PersistError):
                inode = contents.inodes[place]
                found.append(self._known.same(place, inode) or self._known.read(place, inode))
        self._known.forget_others({*contents.places})
        return [stored for stored in found if stored and stored.manifest.target == target]

    def is_whole(self, stored: Stored) -> bool:
        """Return whether one that was found by `known` still has all its files.

        If it has not, that is known from now on.
        """
        return self._is_whole(stored, self._known.inode_of(stored.place))

    def _is_whole(self, stored: Stored, inode: int) -> bool:
        try:
            is_whole = self._known.read(stored.place, inode) == stored
            stored.check_sizes()
        except BadCheckpoint:
            is_whole = False
        self._known.judge(stored.place, is_whole=is_whole)
        return is_whole

    def scan(self) -> Scan:
        """Read all manifests, and look at all files that they name.

        Looks until twice the same is found and no name has changed meanwhile. While another process publishes, one look
        may see a checkpoint neither in the place that it left nor in the one that it came to. A manifest that was
        whole, with its files, is not read again while it is the same file.
        """
        whole = dict[Path, tuple[object, Stored]]()
        changes, result = self._layout.changes(), self._scan_once(whole)
        for _ in range(ATTEMPTS):
            changes_before, before = changes, result
            result, changes = self._scan_once(whole), self._layout.changes()
            if (result, changes) == (before, changes_before):
                break
        return result

    def _scan_once(self, whole: dict[Path, tuple[object, Stored]]) -> Scan:
        found: list[Stored] = []
        contents = self._layout.contents()
        damaged = [(place, f"{place} is of an early version, which is not read") for place in contents.records]
        with _Denied(found) as denied:
            for place in contents.places:
                with denied.at(place):
                    self._scan_place(place, contents, whole, found, damaged)
        # Stable: of two places of an id, the one that did not make way comes first.
        found.sort(key=lambda stored: stored.manifest.id, reverse=True)
        self._known.forget_others({*contents.places})
        return _scan_of(found, damaged, contents)

    def _scan_place(
        self,
        place: Path,
        contents: Contents,
        whole: dict[Path, tuple[object, Stored]],
        found: list[Stored],
        damaged: list[tuple[Path, str]],
    ) -> None:
        stamp = stamp_of(place)  # before it is read: a later manifest has another
        if place in whole and whole[place][0] == stamp:
            found.append(whole[place][1])
            return
        try:
            stored = self._known.read(place, contents.inodes[place])
            if stored:
                self._known.judge(place, is_whole=False)
                stored.check_sizes()
                self._known.judge(place, is_whole=True)
                found.append(stored)
                whole[place] = stamp, stored
            elif self._layout.looks_like_ours(place):
                damaged.append((place, f"{place} has no manifest, which alone tells what was saved"))
        except BadCheckpoint as error:
            if os.path.lexists(place):  # else another process removed it just now
                damaged.append((place, str(error)))

    def place_of(self, bad: Stored | Path) -> Path | None:
        """Return the place of a bad checkpoint, given as found or as a path in `Scan.damaged`; None if it is gone."""
        if isinstance(bad, Stored):
            return bad.place if self._try_to_read(bad.place) == bad else None
        return bad if any(path == bad for path, _ in self.scan().damaged) else None

    def _try_to_read(self, place: Path) -> Stored | None:
        try:
            return self.read(place)
        except BadCheckpoint:
            return None

    def read(self, place: Path, name: str = NAME) -> Stored | None:
        """The checkpoint of the manifest in ``place``, None if there is none; raises BadCheckpoint."""
        manifest = read_manifest(place, name)
        if manifest is None:
            return None
        home = self._layout.home(manifest.id, manifest.target)
        if place.name != home.name and not place.name.startswith(("retired-", "deleted-")):
            raise BadCheckpoint(f"{place} holds {manifest.id}, which belongs in {home}")
        return Stored(manifest, place, self._layout.file_of(manifest))


class _Denied:
    """Places that this user, or this version, cannot read: where a newer checkpoint is found, they are passed over.

    Else they may be all that there is: then the error is raised, which is no verdict on them.
    """

    def __init__(self, found: list[Stored]) -> None:
        self._found = found
        self._errors: dict[Path, PersistError] = {}

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def at(self, place: Path) -> Iterator[None]:
        """Tolerate that this one cannot be read."""
        try:
            yield
        except PersistError as error:
            if not isinstance(error, NewerFormat) and not isinstance(error.__cause__, PermissionError):
                raise
            self._errors[place] = error

    def __exit__(self, kind: object, *_: object) -> None:
        newest = max((stored.id.step for stored in self._found), default=-1)
        for place, error in self._errors.items() if kind is None else ():
            step = place.name.rpartition("-")[2]
            if not step.isdecimal() or int(step) >= newest:
                raise error


def _scan_of(found: list[Stored], damaged: list[tuple[Path, str]], contents: Contents) -> Scan:
    """Return the scan of a directory with these checkpoints, newest first."""
    newest = {stored.target: stored for stored in reversed(found) if stored.target}
    places, stale = list[Stored](), list[Stored]()
    for stored in found:
        (places if not stored.target or newest[stored.target] is stored else stale).append(stored)
    aside = [(place, reason(place)) for place in contents.quarantined]
    return Scan(places, damaged, stale, aside, [id for id, _ in contents.parts])
