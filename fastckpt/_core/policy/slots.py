"""The choice of a save's slot: never the only checkpoint that a resume is sure of, never one that somebody uses."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

Id = tuple[int, int]

EVERY_RANK = ". If one of them never saves, call save_checkpoint(), or step(), on every rank"
"""The remedy if ranks are not known to be late, as they have saved nothing yet."""


@dataclass(frozen=True)
class SlotView:
    """Facts that the owner of an arena knows of a slot.

    Attributes:
        id: History and step of the save in it; None if it holds none.
        committed: True if the save is whole.
        pinned: Reason why it must not change now, such as "step 7 is being persisted"; empty if it may.
        writers: The local ranks that must write their part.
        done: Writers among them that are done.
    """

    id: Id | None = None
    committed: bool = False
    pinned: str = ""
    writers: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()


class SkipKind(StrEnum):
    """The kind of a reason to skip a save, as a label of a metric: one word, of few.

    BUSY: all slots are read, or must be kept. LATE: a rank has not done its part of an older save. GONE: a rank has
    left, or has failed. SUPERSEDED: another job is in this one's place. UNWRITABLE: memory cannot be written to.
    """

    BUSY = "busy"
    LATE = "late"
    GONE = "gone"
    SUPERSEDED = "superseded"
    UNWRITABLE = "unwritable"


@dataclass(frozen=True)
class Skip:
    """A save gets no slot: why, in words, and of which kind that is."""

    reason: str
    kind: SkipKind


def choose_slot(slots: Sequence[SlotView], latest: Mapping[int, Id], common: Collection[Id] = ()) -> int | Skip:
    """The index of the slot for a new save, or why there is none.

    Args:
        slots: All slots of the arena.
        latest: The newest id that each local rank has begun.
        common: The newest save that all nodes hold, as far as is known, and one that is to be it next.
    """
    committed = [slot.id for slot in slots if slot.committed and slot.id is not None]
    # The newest whole checkpoint is never given away: if this save fails, a resume needs it.
    newest = max(committed, default=None)
    # Nor is the newest one that all nodes hold: newer ones may be lost with another node.
    kept = {newest, *common}
    free = {
        i: _rank(slot)
        for i, slot in enumerate(slots)
        if not slot.pinned and (slot.id is None or (slot.id not in kept and not _is_filling(slot, latest)))
    }
    if free:
        return min(free, key=lambda i: (free[i], i))
    # Saves that follow each other faster than nodes learn of them: this one takes the place of the last, rather than
    # be lost on this node alone. A resume has the one that all nodes are known to hold.
    for i, slot in enumerate(slots):
        if slot.id == newest and not slot.pinned and newest not in common and set(common).intersection(committed):
            return i
    reasons = [reason for slot in slots if (reason := _obstacle(slot, newest, common))]
    late = frozenset[int]().union(*(s.writers - s.done for s in slots if s.id is not None and not s.committed))
    # A rank that has saved before makes all calls that it must: it is late, hangs or is dead, which others find out.
    remedy = EVERY_RANK if late - latest.keys() else ""
    return Skip("; ".join(reasons) + remedy, SkipKind.LATE if late else SkipKind.BUSY)


def _rank(slot: SlotView) -> tuple[int, Id]:
    """Empty slots first, then those that will never be whole, then the oldest."""
    if slot.id is None:
        return 0, (0, 0)
    # A save that will never be whole is worth less than the oldest whole checkpoint.
    return (2, slot.id) if slot.committed else (1, slot.id)


def _is_filling(slot: SlotView, latest: Mapping[int, Id]) -> bool:
    """Return whether a save may still become whole, or a writer may still be writing into the slot.

    A writer that has gone on to a newer id without finishing will never finish.
    """
    if slot.committed or slot.id is None:
        return False
    missing = slot.writers - slot.done
    # A rank whose newest id is this one may be writing into the images right now.
    inside = any(latest.get(writer) == slot.id for writer in missing)
    given_up = any(latest.get(writer, (0, 0)) > slot.id for writer in missing)
    return inside or not given_up


def _obstacle(slot: SlotView, newest: Id | None, common: Collection[Id]) -> str:
    if slot.pinned:
        return slot.pinned
    if slot.id is None or slot.id == newest:
        return ""
    if slot.id in common:
        return f"step {slot.id[1]} is the newest that all nodes hold"
    missing = ", ".join(str(writer) for writer in sorted(slot.writers - slot.done))
    return f"step {slot.id[1]} waits for local rank {missing} to save it, too"
