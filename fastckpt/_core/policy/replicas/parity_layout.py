"""Layout of parity: the chunks into which a node's files are cut, and the node of its group that takes each into XOR.

A node's files count as one stream of bytes, in the order of their names. It is cut into as many chunks as there are
other nodes in the group. Each of these nodes holds the XOR of the chunks that come to it. The XOR is as long as the
longest chunk: shorter ones count as if zeros followed. After the loss of one node each chunk of it is the XOR of the
parity that the chunk went into and the other chunks in that.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastckpt._core.policy.replicas.grouping import Group
from fastckpt.errors import ConfigError


class FileRange(NamedTuple):
    """Bytes of a file."""

    name: str
    offset: int
    length: int


def chunks(files: Iterable[tuple[str, int]], count: int) -> list[list[FileRange]]:
    """The ranges of files that make each of so many chunks: all of equal length, but for the last ones.

    Args:
        files: The names and sizes, in any order.
        count: The number of chunks.

    Raises:
        ConfigError: There is to be no chunk at all.
    """
    if count < 1:
        raise ConfigError("parity needs another node in the group; give groups of 2 or more nodes")
    ordered = sorted(files)
    length = -(-sum(size for _, size in ordered) // count)
    found: list[list[FileRange]] = [[] for _ in range(count)]
    number, room = 0, length
    for name, size in ordered:
        offset = 0
        while offset < size:
            part = min(size - offset, room)
            found[number].append(FileRange(name, offset, part))
            offset, room = offset + part, room - part
            if not room:
                number, room = number + 1, length
    return found


def chunk_of(group: Group, member: str, holder: str) -> int:
    """The number of the chunk of a member's files that goes to another member; raises ConfigError if that is none."""
    others = sorted(set(group) - {member})
    if member not in group or holder not in others:
        raise ConfigError(f"{member} and {holder} are not two nodes of the group {group}")
    return others.index(holder)


def ranges_for(group: Group, member: str, holder: str, files: Iterable[tuple[str, int]]) -> list[FileRange]:
    """The ranges of a member's files that are in the parity of another member."""
    return chunks(files, len(group) - 1)[chunk_of(group, member, holder)]


def length_of(ranges: Sequence[FileRange]) -> int:
    """The bytes of a chunk."""
    return sum(each.length for each in ranges)


def pieces(ranges: Iterable[FileRange], length: int) -> list[list[FileRange]]:
    """The same bytes cut into pieces of this length; the last one may be shorter."""
    found: list[list[FileRange]] = []
    room = 0
    for name, start, size in ranges:
        offset = start
        while offset < start + size:
            if not room:
                found.append([])
                room = length
            part = min(start + size - offset, room)
            found[-1].append(FileRange(name, offset, part))
            offset, room = offset + part, room - part
    return found
