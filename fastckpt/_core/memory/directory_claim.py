"""The record that binds the memory in an arena to its checkpoint directory."""

from dataclasses import dataclass
from pathlib import Path

from fastckpt._core.io.regular_file import read_small
from fastckpt._core.memory.records import if_there, read_record, remove_any, write_record, write_text

IDENTITY, CLAIM = "identity", "claim"
_LARGEST = 1 << 64


@dataclass(frozen=True)
class DirectoryClaim:
    """Identity of the directory of this memory: the mark that it has, or the one that it is to get.

    A directory that is full or read-only when it is first used cannot be marked. Until it is, the claim in the arena
    speaks for it, together with the directory's inode: another directory that took its name has another.

    Attributes:
        seen: The mark that was seen in the directory; empty until one was. It is never written there again.
        wanted: Mark that the directory is to get, unless a mark was seen there; empty for nothing.
        inode: The directory's inode when it was claimed; 0 if that is not known, or at a URL.
        unnamed: True if an earlier version made the arena, for a directory that it could not mark.
    """

    seen: str = ""
    wanted: str = ""
    inode: int = 0
    unnamed: bool = False

    @property
    def due(self) -> bool:
        """True if the directory still has to be marked."""
        return bool(self.wanted) and not self.seen

    def is_of(self, mark: str, inode: int = 0) -> bool:
        """Return whether the memory belongs to the directory that has this mark ("" for none) and this inode."""
        if self.seen:
            return self.seen == mark
        if self.wanted:
            return self.wanted == mark or 0 in (self.inode, inode) or self.inode == inode
        return self.unnamed and not mark

    @classmethod
    def read(cls, arena: Path) -> "DirectoryClaim":
        """Read the claim of an arena; an empty claim if it has none. Raises OSError as `read_record`."""
        record = read_record(arena / CLAIM)
        wanted, inode = record.get("mark"), record.get("inode")
        if not (isinstance(wanted, str) and isinstance(inode, int) and 0 <= inode < _LARGEST):
            wanted, inode = "", 0
        if (text := if_there(lambda: read_small(arena / IDENTITY), None)) is None:
            return cls("", wanted, inode)
        seen = text.decode(errors="replace")
        return cls(seen, wanted, inode, unnamed=not (seen or wanted))

    def write(self, arena: Path) -> None:
        """Write the claim to an arena; raises OSError. After a kill between both writes it has the old one, or both."""
        for name in (CLAIM, IDENTITY):
            if not (arena / name).is_file() or (arena / name).is_symlink():
                remove_any(arena / name)
        write_record(arena / CLAIM, {"mark": self.wanted, "inode": self.inode})
        write_text(arena / IDENTITY, self.seen)
