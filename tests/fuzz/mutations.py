"""Bytes that were good once: what a fault of memory, of a disk or of a person makes of them."""

from collections.abc import Sequence

from hypothesis import strategies as st

TELLING = tuple(bytes([byte]) for byte in b"\0\xff\x7f\x80.(tRQbc}]KMJ\x8a")
"""Among them, opcodes of pickle that need others around them."""
PIECES = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"1e999", b"NaN", b"null", b"\\ud800", b"9" * 30]
"""Of JSON."""
DEPTHS = [*range(1, 1200, 37), *range(980, 1010, 3), 5000, 100_000]
"""Of lists in lists: some are read, some are more than the interpreter can."""

Mutation = tuple[str, float, int, bytes]


def mutations(pieces: Sequence[bytes] = TELLING) -> st.SearchStrategy[list[Mutation]]:
    """A few changes, each at a place between 0 and 1."""
    kinds = st.sampled_from(["flip", "write", "remove", "insert", "repeat", "cut"])
    data = st.sampled_from(pieces) | st.binary(min_size=1, max_size=8)
    place = st.floats(0, 1, exclude_max=True)
    return st.lists(st.tuples(kinds, place, st.integers(0, 63), data), min_size=1, max_size=6)


def mutated(good: bytes, changes: Sequence[Mutation]) -> bytes:
    """``good`` with these changes, one after the other."""
    data = bytearray(good)
    for kind, place, number, piece in changes:
        i = int(place * len(data))
        match kind:
            case "flip":
                data[i : i + 1] = bytes(byte ^ (1 << number % 8) for byte in data[i : i + 1])
            case "write":
                data[i : i + len(piece)] = piece
            case "remove":
                del data[i : i + 1 + number]
            case "insert":
                data[i:i] = piece
            case "repeat":
                data[i:i] = data[i : i + 1 + number]
            case "cut" if number < 4:
                del data[i:]
    return bytes(data)
