"""Records of the parity that a node holds: the members of its group, their files, and the pieces that are in the XOR.

Parity counts from the moment that its record is there. Each other member of the group has a record of its own, written
before that.
"""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.regular_file import LARGEST
from fastckpt._core.memory.copies_folder import roots_of
from fastckpt._core.memory.held_saves import place_name, places_in
from fastckpt._core.memory.records import read_record, write_record
from fastckpt._core.policy.replicas.grouping import Group
from fastckpt._core.policy.replicas.parity_layout import FileRange, length_of, ranges_for
from fastckpt.errors import ArenaTooSmall, FastckptError, ProtocolError

PARITY = "parity"
"""The directory of an arena, or of its folder on a disk, with parity of other nodes' files."""
BLOCK, RECORD = "block", "whole.json"
"""The XOR of the chunks, and the record of it, in a place."""
_OF_MEMBER = "member-{}.json"
_OF_PIECE = len(json.dumps(["0" * 32, ""])) - len(json.dumps([""]))
"""Bytes of a record that each piece takes."""

Files = tuple[tuple[str, int, str], ...]
"""Names, sizes and xxh3-128 of the large files of one node."""


@dataclass
class ParityMember:
    """Member of a group as a place has it: its files, and the xxh3-128 of its pieces that are in the XOR."""

    files: Files
    digests: list[str] = field(default_factory=list)


@dataclass
class ParityRecord:
    """Record of the members with pieces in a place.

    Attributes:
        group: The members of the group.
        own: The member that this node is.
        piece: Bytes of a piece.
        members: The other members of which something is in it.
    """

    group: Group
    own: str
    piece: int
    members: dict[str, ParityMember] = field(default_factory=dict)

    def ranges(self, member: str) -> list[FileRange]:
        """The ranges of a member's files that make its chunk."""
        return ranges_for(self.group, member, self.own, [(name, size) for name, size, _ in self.members[member].files])

    def size(self, member: str) -> int:
        """Bytes of a member's chunk."""
        return length_of(self.ranges(member))

    def has(self, member: str) -> bool:
        """Return whether the chunk of a member is in the XOR."""
        known = self.members.get(member)
        return known is not None and len(known.digests) * self.piece >= self.size(member)

    @property
    def others(self) -> list[str]:
        """The other members."""
        return [member for member in self.group if member != self.own]

    @property
    def is_whole(self) -> bool:
        """Return whether the chunks of all other members are in the XOR."""
        return all(map(self.has, self.others))

    def demand_short(self, member: str) -> None:
        """Raise ArenaTooSmall if the record of a member will be longer than it may be."""
        known, pieces = self.members[member], -(-self.size(member) // self.piece)
        if (length := len(json.dumps(_as_record(known))) + pieces * _OF_PIECE) > LARGEST:
            text = f"the record of parity would have {length} bytes for {len(known.files)} files in {pieces} pieces"
            raise ArenaTooSmall(f"{text}: a member may have {LARGEST}. Give larger groups, or --fast-replicas 1")


def parity_places(arena: Path) -> dict[Path, SaveId]:
    """The places of an arena with parity, whole or not, and the saves that it is of."""
    return places_in(arena / PARITY)


def parity_place(arena: Path, id: SaveId, attempt: str, group: Group) -> Path:
    """Return the directory for the parity of a save of a group."""
    return arena / PARITY / place_name(id, "\n".join([attempt, *group]))


def whole_parities(arena: Path, id: SaveId, attempt: str) -> list[ParityRecord]:
    """The records of whole parity of a save; several if its nodes were in several groups, one after the other."""
    return [
        record
        for root in roots_of(arena)
        for path, of in parity_places(root).items()
        if of == id and (record := read_parity(path)) and path == parity_place(root, id, attempt, record.group)
    ]


def write_parity(path: Path, record: ParityRecord) -> None:
    """Have a place count; raises OSError if that cannot be written."""
    for number, member in enumerate(record.others):
        write_record(path / _OF_MEMBER.format(number), _as_record(record.members[member]))
    write_record(path / RECORD, {"group": record.group, "own": record.own, "piece": record.piece})


def read_parity(path: Path) -> ParityRecord | None:
    """The record in a place; None if it is not whole."""
    with contextlib.suppress(FastckptError):  # others may have written it
        match read_record(path / RECORD):
            case {"group": [*group], "own": str(own), "piece": int(piece)} if piece > 0:
                found = ParityRecord(tuple(map(str, group)), own, piece)
                for number, member in enumerate(found.others):
                    found.members[member] = _member(read_record(path / _OF_MEMBER.format(number)))
                return found if found.is_whole else None
    return None


def _as_record(member: ParityMember) -> dict[str, object]:
    return {"files": member.files, "digests": member.digests}


def _member(record: object) -> ParityMember:
    match record:
        case {"files": files, "digests": [*digests]}:
            return ParityMember(files_in(files), [*map(str, digests)])
    raise ProtocolError("the record names no files of a member")


def files_in(values: object) -> Files:
    """The files that a message or a record names; raises ProtocolError if that is no list of them."""
    match values:
        case [*files]:
            found = [(name, size, digest) for name, size, digest in map(_three, files)]
            return tuple(sorted(found))
    raise ProtocolError("the message names no files")


def _three(values: object) -> tuple[str, int, str]:
    match values:
        case [str(name), int(size), str(digest)] if size >= 0:
            return name, size, digest
    raise ProtocolError("the message names no files")
