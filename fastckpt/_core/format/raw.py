"""Files that have no tensors: bytes as they are, and texts that may end with spaces."""

from dataclasses import dataclass

from fastckpt._core.format.plan import Plan
from fastckpt._core.format.skeleton import Skeleton
from fastckpt.errors import NotLoadable


@dataclass(frozen=True)
class Raw:
    """The bytes of a file.

    Attributes:
        data: Its bytes; at least one.
        may_end_with_spaces: True if readers allow that, as those of JSON do: the file need not be made again when it
            grows.
    """

    data: bytes
    may_end_with_spaces: bool = False


class Exact(Skeleton):
    """A file that has no room to grow."""

    def padding(self, capacity: int) -> tuple[int, bytes]:
        """Return no padding."""
        return self.length, b""

    def fits(self, capacity: int) -> bool:
        """Return whether a file of ``capacity`` bytes has exactly this length."""
        return capacity == self.length

    def capacity(self) -> int:
        """Its length."""
        return self.length


class Spaced(Skeleton):
    """A text with spaces after its end."""

    def padding(self, capacity: int) -> tuple[int, bytes]:
        """The spaces."""
        return self.length, b" " * (capacity - self.length)


class RawPlanner:
    """Plans the saves of one file, which is written again only if its bytes have changed."""

    def __init__(self) -> None:
        self._last = Raw(b"")
        self._skeleton: Skeleton = Exact((), 0, (), ())

    def plan(self, raw: Raw) -> Plan:
        """Plan a save; raises NotLoadable for no bytes."""
        if not raw.data:
            raise NotLoadable("a file of no bytes cannot be saved; leave it out")
        if raw != self._last:
            kind = Spaced if raw.may_end_with_spaces else Exact
            self._last, self._skeleton = raw, kind(((0, raw.data),), len(raw.data), (), ())
        return Plan(self._skeleton, [], [])
