"""Long lists, tuples and dicts of numbers, pickled as one piece: torch's pickler calls Python for each object."""

import io
import os
import pickle
import re
from typing import Any

MANY = 1024
"""Numbers from which on a container is pickled as one piece; fewer have a place each, of fixed width."""
_CONTAINERS = frozenset({list, tuple, dict})
_NUMBERS = frozenset({int, float, bool})
_KEYS = frozenset({int, str})
_BINPERSID, _LONG_BINPUT, _LONG_BINGET = b"Q", b"r", b"j"


class PickledNumbers(bytes):
    """Pickle, in protocol 2, of a container of many numbers."""


def pickled_numbers(node: Any) -> PickledNumbers | None:
    """The pickle of a list, tuple or dict that has many numbers, and nothing else; None for any other object."""
    kind = type(node)
    if kind not in _CONTAINERS or len(node) < MANY:
        return None
    if kind is dict and not _KEYS.issuperset(map(type, node)):
        return None
    if not _NUMBERS.issuperset(map(type, node.values() if kind is dict else node)):
        return None
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 2)
    pickler.fast = True  # no memo: its numbers would be those of the pickle around it
    pickler.dump(node)
    return PickledNumbers(file.getbuffer()[2:-1])  # without opcodes PROTO and STOP


class NumberLists:
    """Containers of many numbers in one pickle: a pickler writes a marker for each, and `insert` the numbers.

    Attributes:
        spans: Position and length of each in the pickle, in bytes; in the order in which a pickler meets them.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self._met: dict[int, tuple[int, Any, bytes]] = {}
        self._secret = os.urandom(4)
        self._is_shared = False

    def marker(self, node: Any) -> int | None:
        """The persistent id by which a pickler writes this object; None if that is to write the object itself.

        `PickledNumbers` become zeros: the caller that took them out of a state writes them to their span.
        """
        kind = type(node)
        if kind not in _CONTAINERS and kind is not PickledNumbers:
            return None
        if (known := self._met.get(id(node))) is not None:
            self._is_shared = True
        else:
            pickled = bytes(len(node)) if kind is PickledNumbers else pickled_numbers(node)
            if pickled is None:
                return None
            # with the object: the pickler does not keep it, and another may get its id
            known = self._met[id(node)] = len(self._met), node, pickled
        return int.from_bytes(known[0].to_bytes(3, "little") + self._secret + b"A", "little")

    def insert(self, pickler: pickle.Pickler, pickled: bytes) -> bytes:
        """The pickle with the containers in place of their markers; one that is met again refers to the first."""
        if not self._met:
            return pickled
        pattern = re.compile(rb"\x8a\x08(.{3})" + re.escape(self._secret) + b"A" + _BINPERSID, re.DOTALL)
        of_number = {number: each for number, _, each in self._met.values()}
        memo = len(pickler.memo.copy()) if self._is_shared else 0
        whole, end = bytearray(), 0
        for match in pattern.finditer(pickled):
            number = int.from_bytes(match[1], "little")
            whole += pickled[end : match.start()]
            end = match.end()
            place = (memo + number).to_bytes(4, "little")
            if number < len(self.spans):
                whole += _LONG_BINGET + place
                continue
            self.spans.append((len(whole), len(of_number[number])))
            whole += of_number[number]
            if self._is_shared:
                whole += _LONG_BINPUT + place
        if len(self.spans) != len(self._met):
            raise RuntimeError(f"a pickle has {len(self.spans)} of {len(self._met)} lists of numbers")
        return bytes(whole) + pickled[end:]
