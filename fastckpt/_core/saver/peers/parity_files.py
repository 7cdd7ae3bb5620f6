"""Parity of other nodes' large files in memory, or on a disk: the XOR of one chunk of each other member of its group.

Chunks come in pieces, and a piece goes into the XOR once it is whole and its digest was compared: so half of one is
never in it. Which pieces of whom are in it is remembered, because the same piece twice would take it out again. A place
counts from the moment that all members' chunks are in it; its record is written then, and nothing of it changes after
that. Until then it is of no use to anybody, so an agent that starts again starts it again.
"""

import contextlib
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from fastckpt._core.byte_sizes import binary
from fastckpt._core.format.ids import SaveId
from fastckpt._core.huge_pages import is_in_memory
from fastckpt._core.memory.copies_folder import CopiesFolder
from fastckpt._core.memory.headroom import headroom
from fastckpt._core.memory.pages import allocate, write_out
from fastckpt._core.memory.parity_records import (
    BLOCK,
    RECORD,
    Files,
    ParityMember,
    ParityRecord,
    parity_place,
    parity_places,
    read_parity,
    whole_parity,
)
from fastckpt._core.memory.records import make_folders, names_in, remove_any, write_record
from fastckpt.errors import ArenaTooSmall, FastckptError, ProtocolError

PIECE = 32 << 20
"""Bytes of a chunk that are received, compared and taken into the XOR at once: that much memory a sender costs."""
BLOCK_ON_DISK = 4 << 20
"""Bytes that are read, or written, at once on a disk."""
_SPARE = "parity-spare"


class ParityPlace:
    """A place whose chunks are coming; any thread may add a piece."""

    def __init__(self, path: Path, id: SaveId, record: ParityRecord, descriptor: int, allocated: int) -> None:
        self.path, self.id, self.record = path, id, record
        self._descriptor, self._allocated, self._filled = descriptor, allocated, 0
        self._lock = threading.Lock()

    def missing(self, member: str) -> int:
        """The number of the first piece of a member that is not in the XOR."""
        with self._lock:
            return len(self.record.members[member].digests)

    def admit(self, member: str, files: Files, room: Callable[[int], None]) -> None:
        """Have memory for the chunk of a member; raises ArenaTooSmall, and ProtocolError if its files were others.

        Args:
            member: The member.
            files: Its files.
            room: Called with the bytes of memory that are to come; raises ArenaTooSmall if they are not there.
        """
        with self._lock:
            known = self.record.members.setdefault(member, ParityMember(files))
            if known.files != files:
                raise ProtocolError(f"{member} had other files of {self.id} before")
            if (size := self.record.size(member)) > self._allocated:
                room(size - self._allocated)
                try:
                    if self._allocated:  # `allocate` writes to what it makes: what is there already has chunks in it
                        os.posix_fallocate(self._descriptor, self._allocated, size - self._allocated)
                    else:
                        allocate(self._descriptor, size)
                except OSError as error:
                    raise ArenaTooSmall(f"parity of {binary(size)} does not fit: {error}") from error
                self._allocated = size

    def add(self, member: str, number: int, data: memoryview, digest: str) -> None:
        """Take a piece into the XOR.

        Raises FastckptError if it is not the next one of its member, or the place was released, and ArenaTooSmall if
        the disk does not take it: then the place never counts.
        """
        with self._lock:
            known = self.record.members[member]
            if self._descriptor < 0 or len(known.digests) != number:
                raise FastckptError(f"piece {number} of {member} is not what comes next in the parity of {self.id}")
            start, end = number * self.record.piece, number * self.record.piece + len(data)
            # What no chunk has come to yet is written, and not made zero first: pages that serve again have old bytes.
            old = max(0, min(self._filled - start, len(data)))
            if not is_in_memory(self._descriptor):
                self._add_on_disk(start, data, old)
                self._filled = max(self._filled, end)
                known.digests.append(digest)
                return
            with mmap.mmap(self._descriptor, end) as mapped, memoryview(mapped) as view:
                if old:
                    with view[start : start + old] as target, data[:old] as source:
                        xor_into(target, source)
                view[start + old : end] = data[old:]
            self._filled = max(self._filled, end)
            known.digests.append(digest)

    def _add_on_disk(self, start: int, data: memoryview, old: int) -> None:
        """Do so without a mapping: a disk that fails would kill who writes to one."""
        block = bytearray(min(BLOCK_ON_DISK, len(data)))
        try:
            for offset in range(0, len(data), BLOCK_ON_DISK):
                with data[offset : offset + BLOCK_ON_DISK] as piece, memoryview(block)[: len(piece)] as joined:
                    joined[:] = piece
                    if count := max(0, min(old - offset, len(piece))):
                        there = os.pread(self._descriptor, count, start + offset)
                        with joined[:count] as target, memoryview(there) as source:
                            xor_into(target, source)
                    write_out(self._descriptor, joined, start + offset)
        except (OSError, ValueError) as error:  # half of a piece may be in it: it can never count
            os.close(self._descriptor)
            self._descriptor = -1
            raise ArenaTooSmall(f"parity of {self.id} cannot be kept in {self.path}: {error}") from error

    def finish(self) -> None:
        """Make it count; call it once, when it is whole."""
        with self._lock:
            os.ftruncate(self._descriptor, self._filled)
            members = {id: {"files": each.files, "digests": each.digests} for id, each in self.record.members.items()}
            record = {"group": self.record.group, "own": self.record.own, "piece": self.record.piece}
            write_record(self.path / RECORD, {**record, "members": members})
        self.close()

    def close(self) -> None:
        """Take no more pieces."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


class ParityFiles:
    """What an arena holds of parity; any thread may use it.

    Args:
        arena: The arena.
        needed: The ids of the newest save that all nodes hold, and of one that is to be it next.
        in_use: Whether workers of this node may choose to resume what is there.
        piece: Bytes of a piece.
        folder: Where parity is; in the arena, if none is given.
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
        self._lock = threading.RLock()

    @property
    def could_release(self) -> bool:
        """Whether nothing is kept for the only reason that workers may choose to resume it."""
        return not self._in_use()

    def clear_away(self) -> None:
        """Remove what an owner that died has left unfinished, or spare."""
        remove_any(self._arena / _SPARE)
        for path in self._places():
            if not (path / RECORD).exists():
                remove_any(path)

    def close(self) -> None:
        """Take no more pieces."""
        with self._lock:
            for place in self._coming.values():
                place.close()

    def admit(
        self, id: SaveId, attempt: str, record: ParityRecord, member: str, files: Files, common: SaveId | None
    ) -> ParityPlace | None:
        """The place for the chunk of a member, with memory for it; None if the chunk is in one already.

        Raises ArenaTooSmall if there is no memory for it, and ProtocolError if its files were others.

        Args:
            id: The save.
            attempt: Its token.
            record: The group, and the member that this node is.
            member: The member whose chunk comes.
            files: Its files.
            common: The newest save that all nodes hold, of which nothing may be released; None if it is not known.
        """
        self._folder.ensure()
        path = parity_place(self._arena, id, attempt, record.group)
        with self._lock:
            if (whole := read_parity(path)) is not None:
                if whole.members[member].files != files:
                    raise ProtocolError(f"{member} had other files of {id} before")
                return None
            place = self._coming.get(path)
            if place is None:
                self._make_way(id, common)
                place = self._coming[path] = self._new_or_why(path, id, record)
            place.admit(member, files, self._check_room)
            self._finish(place)
            return None if place.record.has(member) else place

    def came(self, place: ParityPlace) -> None:
        """Note that the chunk of a member is in a place: if it is the last one, the place counts from now on."""
        with self._lock:
            self._finish(place)

    def find(self, id: SaveId, attempt: str, lost: str) -> tuple[Path, ParityRecord]:
        """The block and the record of whole parity of a save that a member is in; raises FastckptError if none is."""
        if (found := whole_parity(self._lists, id, attempt)) is not None and lost in found[1].members:
            return found
        raise FastckptError(f"this node has no whole parity of {id} with files of {lost}")

    def bytes(self) -> int:
        """Bytes that parity takes, with what is spare."""
        found = 0
        for path in [*(path / BLOCK for path in self._places()), *(self._arena / _SPARE).glob("*")]:
            with contextlib.suppress(OSError):
                found += path.lstat().st_size
        return found

    def _places(self) -> dict[Path, SaveId]:
        return parity_places(self._arena)

    def _new_or_why(self, path: Path, id: SaveId, record: ParityRecord) -> ParityPlace:
        try:
            return self._new(path, id, record)
        except FileNotFoundError:
            raise  # the arena, or the folder, was removed just now
        except OSError as error:
            raise ArenaTooSmall(f"parity of {id} cannot be kept: {error}") from error

    def _new(self, path: Path, id: SaveId, record: ParityRecord) -> ParityPlace:
        remove_any(path)
        make_folders(self._arena, path)
        spare = [self._arena / _SPARE / name for name in names_in(self._arena / _SPARE)]
        if spare:  # pages that are there already are written ten times as fast
            spare[0].rename(path / BLOCK)
        descriptor = os.open(path / BLOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fresh = ParityRecord(record.group, record.own, self._piece)
        return ParityPlace(path, id, fresh, descriptor, os.fstat(descriptor).st_size)

    def _finish(self, place: ParityPlace) -> None:
        if place.record.is_whole and self._coming.get(place.path) is place:
            place.finish()
            del self._coming[place.path]
            for path, id in self._places().items():  # of another group, in an earlier round
                if id == place.id and path != place.path:
                    self._release(path)

    def _make_way(self, save: SaveId, common: SaveId | None) -> None:
        """Release parity of older saves than the one that comes, but of the newest that all nodes hold."""
        needed = {common} if common else {*self._needed()}
        if not self._in_use():
            for root in self._folder.roots:
                for path, id in parity_places(root).items():
                    if id < save and id not in needed:
                        self._release(path) if root == self._arena else remove_any(path)

    def _release(self, path: Path) -> None:
        if (place := self._coming.pop(path, None)) is not None:
            place.close()
        make_folders(self._arena, self._arena / _SPARE)
        for spare in names_in(self._arena / _SPARE):  # one is enough: one place comes at a time
            remove_any(self._arena / _SPARE / spare)
        (path / RECORD).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (path / BLOCK).rename(self._arena / _SPARE / secrets.token_hex(4))
        remove_any(path)

    def _check_room(self, size: int) -> None:
        room = headroom(self._arena.parent)
        if room.free < size:
            remedies = self._folder.remedies(room, size - room.free)
            text = f"parity of {binary(size)} more does not fit: {room}. {remedies}"
            raise ArenaTooSmall(text)


def xor_into(target: memoryview, source: memoryview) -> None:
    """XOR equally many bytes into memory."""
    found = np.frombuffer(target, np.uint8)
    np.bitwise_xor(found, np.frombuffer(source, np.uint8), out=found)
