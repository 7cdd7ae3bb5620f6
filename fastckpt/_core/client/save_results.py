"""Requests to save, and their results."""

import enum
from dataclasses import dataclass
from typing import Any

from fastckpt._core.arguments import member

ABSENT = "the other ranks did not come to this save"
"""The begin of the reason of a save that was skipped for that."""


class StorageType(enum.Enum):
    """Tier that a save must reach: MEMORY, or DISK, in the background."""

    MEMORY = 0
    DISK = 1

    @classmethod
    def _missing_(cls, value: object) -> "StorageType":
        """Return the member of the same name for one of another library, which its scripts still import.

        Raises:
            ConfigError: It is none.
        """
        theirs = value.name if isinstance(value, enum.Enum) and type(value).__name__ == cls.__name__ else ""
        if theirs in cls.__members__:
            return cls[theirs]
        raise member(cls, "storage_type", value)


def at_least(storage_type: StorageType | None, *given: Any) -> StorageType | None:
    """The storage type of a save: if it was left out, DISK where anything else is given that asks for storage.

    None, for one that was left out, means DISK, except that a newer save may be persisted in its place.

    Raises ValueError for a value that is no StorageType.
    """
    if storage_type is None:
        return StorageType.DISK if any(given) else None
    return StorageType(storage_type)


@dataclass(frozen=True)
class SaveRequest:
    """Request to persist a save, or to leave it in memory.

    Attributes:
        persist: True if it is to be persisted.
        overtakable: True if a newer one may be persisted instead, as long as this one waits.
        agreed: True if all nodes persist it, unless they are busy.
    """

    persist: bool = False
    overtakable: bool = False
    agreed: bool = False


TO_MEMORY, TO_DISK = SaveRequest(), SaveRequest(persist=True)


@dataclass(frozen=True)
class SaveResult:
    """The result of a save.

    Attributes:
        saved: This rank's part is in memory, or pending.
        step: The step.
        reason: Reason why it was not saved, or that memory has it; or empty.
        skipped: Saves that this checkpointer has skipped so far.
        trouble: Reason why persists, or the previous pending save, fail; or empty. Training may go on.
        pending: A part is still copied in the background, until the optimizer's next step.
    """

    saved: bool
    step: int
    reason: str = ""
    skipped: int = 0
    trouble: str = ""
    pending: bool = False

    def __bool__(self) -> bool:
        return self.saved
