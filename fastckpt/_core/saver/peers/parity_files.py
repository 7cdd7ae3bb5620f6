"""Parity of other nodes' large files in memory, or on a disk: the XOR of one chunk of each other member of its group.

A place counts from the moment that all members' chunks are in it; its record is written then, and nothing of it changes
after that. Until then it is of no use to anybody, so an agent that starts again starts it again.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fastckpt._core.byte_sizes import binary
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.copies_folder import CopiesFolder, roots_of
from fastckpt._core.memory.headroom import headroom
from fastckpt._core.memory.parity_records import (
    BLOCK,
    RECORD,
    Files,
    ParityRecord,
    parity_place,
    parity_places,
    read_parity,
)
from fastckpt._core.memory.records import make_folders, names_in, remove_any
from fastckpt._core.policy.replicas.grouping import Group
from fastckpt._core.saver.peers.parity_place import ParityPlace
from fastckpt.errors import ArenaTooSmall, FastckptError, ProtocolError

PIECE = 8 << 20
"""Bytes of a chunk that are received, compared and taken into the XOR at once: that much memory a sender costs.

A processor's cache still holds them for the XOR; smaller ones make records longer, and wait for more answers.
"""
_SPARE = "parity-spare"


@dataclass(frozen=True)
class ChunkRequest:
    """The request to take a chunk into parity.

    Attributes:
        id: The save.
        attempt: Its token.
        group: The members of the group.
        own: The member that this node is.
        member: The sender of the chunk.
        files: Its files.
        common: The newest save that all nodes hold, of which nothing may be released; None if it is not known.
        is_replicated: True if parity of that one is whole in all groups of this round.
    """

    id: SaveId
    attempt: str
    group: Group
    own: str
    member: str
    files: Files
    common: SaveId | None = None
    is_replicated: bool = False


class ParityFiles:
    """Parity in an arena; any thread may use it.

    Args:
        arena: The arena.
        needed: The ids of the newest save that all nodes hold, and of one that is to be it next.
        in_use: Returns whether workers of this node may choose to resume from it.
        piece: Bytes of a piece.
        folder: Folder of parity; the arena, if none is given.
    """

    def __init__(
        self,
        arena: Path,
        needed: Callable[[], Collection[SaveId]],
        in_use: Callable[[], bool],
        piece: int = PIECE,
        folder: CopiesFolder | None = None,
    ) -> None:
        self._lists, self._folder = arena, folder or CopiesFolder(arena)
        self._arena, self._needed, self._in_use, self._piece = self._folder.path, needed, in_use, piece
        self._coming: dict[Path, ParityPlace] = {}
        self._lock, self._making = threading.RLock(), threading.Lock()

    @property
    def could_release(self) -> bool:
        """Return whether parity that is not needed could be released: no worker may choose to resume it."""
        return not self._in_use()

    def clear_away(self) -> None:
        """Remove unfinished and spare parity of an owner that died."""
        remove_any(self._arena / _SPARE)
        for path in self._places():
            if not (path / RECORD).exists():
                remove_any(path)

    def close(self) -> None:
        """Take no more pieces."""
        with self._lock:
            for place in self._coming.values():
                place.close()

    def admit(self, request: ChunkRequest) -> ParityPlace | None:
        """The place for the chunk of a member, with memory for it; None if the chunk is in one already.

        Raises ArenaTooSmall if there is no memory for it, and ProtocolError if its files were others.
        """
        self._folder.ensure()
        path, member = parity_place(self._arena, request.id, request.attempt, request.group), request.member
        with self._lock:
            if (whole := read_parity(path)) is not None:
                if whole.members[member].files != request.files:
                    raise ProtocolError(f"{member} had other files of {request.id} before")
                return None
            if (place := self._coming.get(path)) is None:
                self._make_way(path, request)
                place = self._coming[path] = self._new_or_why(path, request)
            place.expect(member, request.files)
        if place.lacks(size := place.record.size(member)):
            with self._making:  # one at a time: two would count the same free memory. Other chunks go on meanwhile
                place.grow(size, self._demand_room)
        self.came(place)  # an empty one is
        return None if place.record.has(member) else place

    def came(self, place: ParityPlace) -> None:
        """Note that the chunk of a member is in a place: if it is the last one, the place counts from now on."""
        with self._lock:
            self._finish(place)

    def find(self, id: SaveId, attempt: str, lost: str, group: Group) -> tuple[Path, ParityRecord]:
        """The block and the record of a group's whole parity of a save; raises FastckptError without, or a member."""
        for root in roots_of(self._lists):
            path = parity_place(root, id, attempt, group)
            if (found := read_parity(path)) is not None and lost in found.members:
                return path / BLOCK, found
        raise FastckptError(f"this node has no whole parity of {id} with files of {lost}")

    def give_back(self, needed: Collection[SaveId]) -> None:
        """Remove parity of other saves than these, where no newer one comes in its place."""
        with self._lock:
            for path, id in self._places().items():
                if id not in needed:
                    self._release(path)
            remove_any(self._arena / _SPARE)

    def bytes(self) -> int:
        """Bytes of parity, and of spare blocks."""
        found = 0
        for path in [*(path / BLOCK for path in self._places()), *(self._arena / _SPARE).glob("*")]:
            with contextlib.suppress(OSError):
                found += path.lstat().st_size
        return found

    def _places(self) -> dict[Path, SaveId]:
        return parity_places(self._arena)

    def _new_or_why(self, path: Path, request: ChunkRequest) -> ParityPlace:
        try:
            return self._new(path, request)
        except FileNotFoundError:
            raise  # the arena, or the folder, was removed just now
        except OSError as error:
            raise ArenaTooSmall(f"parity of {request.id} cannot be kept: {error}") from error

    def _new(self, path: Path, request: ChunkRequest) -> ParityPlace:
        remove_any(path)
        make_folders(self._arena, path)
        spare = [self._arena / _SPARE / name for name in names_in(self._arena / _SPARE)]
        if spare:  # pages that are there already are written ten times as fast
            spare[0].rename(path / BLOCK)
        descriptor = os.open(path / BLOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        record = ParityRecord(request.group, request.own, self._piece)
        return ParityPlace(path, request.id, record, descriptor, os.fstat(descriptor).st_size)

    def _finish(self, place: ParityPlace) -> None:
        if place.record.is_whole and self._coming.get(place.path) is place:
            place.finish()
            del self._coming[place.path]

    def _make_way(self, path: Path, request: ChunkRequest) -> None:
        """Release the parity that a new one replaces: of older saves, but the newest that all nodes hold.

        Two groups may have made parity of one save. That of the later group counts when all nodes have it. Until then
        the earlier one stays, because the host that has taken the place of a lost one may be lost, too.
        """
        common = request.common
        needed = {request.id, common} if common else {request.id, *self._needed()}
        all_places = {place: id for root in self._folder.roots for place, id in parity_places(root).items()}
        places = {place: id for place, id in all_places.items() if id <= request.id and place != path}
        for place in self._coming.keys() & places.keys():  # they lack a chunk, and its sender has turned to this one
            self._release(place)
            del places[place]
        if self._in_use():
            return
        kept = set[SaveId]()
        for place in sorted(places, key=lambda place: self._precedence(place, request)):
            if (id := places[place]) in needed - kept:
                kept.add(id)
            else:
                self._release(place)

    def _precedence(self, place: Path, request: ChunkRequest) -> tuple[bool, int]:
        """A key by which that one comes first which all members have: of this group, if it is known, or the oldest."""
        record = read_parity(place)
        is_former = record is None or (request.is_replicated and record.group != request.group)
        return is_former, (place / RECORD).stat().st_mtime_ns if record else 0

    def _release(self, path: Path) -> None:
        may_serve_again = path not in self._coming or self._coming.pop(path).close()
        may_serve_again = may_serve_again and path.is_relative_to(self._arena)
        (path / RECORD).unlink(missing_ok=True)
        if may_serve_again:
            make_folders(self._arena, self._arena / _SPARE)
            for spare in names_in(self._arena / _SPARE):  # one is enough: one place comes at a time
                remove_any(self._arena / _SPARE / spare)
            with contextlib.suppress(FileNotFoundError):
                (path / BLOCK).rename(self._arena / _SPARE / secrets.token_hex(4))
        remove_any(path)

    def _demand_room(self, size: int) -> None:
        room = headroom(self._arena.parent)
        if room.free < size:
            text = (
                f"parity of {binary(size)} more does not fit: {room}. {self._folder.remedies(room, size - room.free)}"
            )
            raise ArenaTooSmall(text)
