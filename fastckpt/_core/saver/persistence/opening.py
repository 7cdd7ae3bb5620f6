"""The facts about its history that each save carries, by which its record is made and recognized."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MEMBERS, ROUND
from fastckpt._core.memory import slots


@dataclass(frozen=True)
class Opening:
    """The facts about its history that a save has; the arguments are as in `Record`.

    Attributes:
        is_rollback: True if the user had the job go on from an older save than the newest.
    """

    id: SaveId
    token: str
    members: tuple[str, ...] = ()
    parent: SaveId | None = None
    is_rollback: bool = False

    @classmethod
    def of(cls, id: SaveId, details: Any) -> "Opening":
        """Read the details of a save; a save of an earlier version has no token."""
        parent = details.get("parent")
        members = tuple(map(str, details.get(MEMBERS, ())))
        return cls(id, str(details.get(ROUND, "")), members, SaveId(*parent) if parent else None, "rollback" in details)

    def is_of_line(self, details: Mapping[str, Any]) -> bool:
        """Return whether the save with these details was made by the same workers, since they last loaded."""
        return bool(self.token) and self.token == details.get(ROUND)

    @classmethod
    def of_slot(cls, slot: Path) -> "Opening | None":
        """Read the save that is whole in a slot; None if there is none."""
        records = slots.read(slot)
        return cls.of(records.committed, records.details) if records.committed else None
