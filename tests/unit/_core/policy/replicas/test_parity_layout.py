"""Layout of parity: every loss of one of a group is rebuilt from what the others hold, with files of any sizes."""

from collections.abc import Mapping
from itertools import product

from fastckpt._core.policy.replicas.parity_layout import FileRange, length_of, pieces, ranges_for
from tests.support.tables import for_each

Files = Mapping[str, bytes]


def contents(node: int, sizes: tuple[int, ...]) -> dict[str, bytes]:
    """Files of these sizes with bytes that differ from node to node and from place to place."""
    return {
        f"f{number}": bytes((node * 89 + number * 31 + place * 7 + 1) % 251 for place in range(size))
        for number, size in enumerate(sizes)
    }


def sizes_of(files: Files) -> list[tuple[str, int]]:
    return [(name, len(data)) for name, data in files.items()]


def chunk(group: tuple[str, ...], member: str, holder: str, files: Files) -> bytes:
    ranges = ranges_for(group, member, holder, sizes_of(files))
    return b"".join(files[name][offset : offset + length] for name, offset, length in ranges)


def xor(parts: list[bytes]) -> bytes:
    found = bytearray(max(map(len, parts), default=0))
    for part in parts:
        for place, byte in enumerate(part):
            found[place] ^= byte
    return bytes(found)


def rebuilt(group: tuple[str, ...], lost: str, of: Mapping[str, Files]) -> dict[str, bytes]:
    """The files of a lost node, from the parity that the others hold and their own files."""
    sizes = sizes_of(of[lost])
    found = {name: bytearray(size) for name, size in sizes}
    for holder in group:
        if holder == lost:
            continue
        parity = xor([chunk(group, each, holder, of[each]) for each in group if each != holder])
        others = [chunk(group, each, holder, of[each]) for each in group if each not in (holder, lost)]
        data, at = xor([parity, *others]), 0
        for name, offset, length in ranges_for(group, lost, holder, sizes):
            found[name][offset : offset + length] = data[at : at + length]
            at += length
    return {name: bytes(data) for name, data in found.items()}


@for_each(
    (2, [(), (0,), (5,), (0, 4, 1)]),
    (3, [(), (1,), (7,), (3, 0, 4)]),
    (4, [(), (3, 5), (9,)]),
)
def test_every_loss_of_one_node_is_rebuilt_whatever_files_the_nodes_have(count: int, shapes: list[tuple[int, ...]]):
    group = tuple(f"n{number}" for number in range(count))
    for choice in product(shapes, repeat=count):
        of = {id: contents(number, choice[number]) for number, id in enumerate(group)}
        for lost in group:
            assert rebuilt(group, lost, of) == of[lost]


def test_pieces_have_the_same_bytes_in_the_same_order():
    ranges = [FileRange("a", 2, 5), FileRange("b", 0, 1), FileRange("c", 0, 3)]
    for length in range(1, 11):
        found = pieces(ranges, length)
        places = [(name, offset + at) for piece in found for name, offset, size in piece for at in range(size)]
        assert places == [(name, offset + at) for name, offset, size in ranges for at in range(size)]
        assert {*map(length_of, found[:-1])} <= {length} and 0 < length_of(found[-1]) <= length
    assert pieces([], 4) == []
