"""Durable checkpoints as the first rank finds them, in a message to all others: no other rank searches storage.

It has the entries by which one is chosen. The files and their digests are in the manifest of the one chosen.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._core.format.completeness import RANKS
from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.resume import CheckpointLocation
from fastckpt._core.resume.tiers import Candidate, Candidates, Listing, Rejected, RejectionKind

if TYPE_CHECKING:
    from fastckpt._core.resume.storage_tier import StorageTier

JSON = Any


class StoredEntry(NamedTuple):
    """The record of a durable candidate whose manifest this rank has not read.

    Attributes:
        id: Id of the save.
        place: The path or URL of the directory of its manifest.
        target: The path or URL that the user named for the model, if any.
        token: A name that no other reading of manifests has.
    """

    id: SaveId
    place: Path | str
    target: Path | str | None
    token: str

    @classmethod
    def of(cls, tier: "StorageTier", save: SaveId, place: str, target: str | None, token: str) -> "StoredEntry":
        """The entry that a message has, with paths for a directory."""
        if tier.is_far:
            return cls(save, place, target, token)
        return cls(save, Path(place), None if target is None else Path(target), token)


def described(listing: Listing, main: str, own: Sequence[str]) -> JSON:
    """Return the first rank's findings in one tier, as a message.

    Args:
        listing: Result of the search.
        main: The file without which a checkpoint is of another kind.
        own: The file that each rank needs besides it, unless the checkpoint is of fewer ranks.
    """
    found, rejected = [], list(listing.rejected)
    for at, each in listing.candidates.items():
        if main not in each.files:
            rejected.append(Rejected(RejectionKind.OTHER_KIND, each.record.path))
            continue
        lacking = [rank for rank, name in enumerate(own[: each.world_size]) if name not in each.files]
        details = {name: value for name, value in each.details.items() if name != RANKS}  # which grows with the ranks
        target = None if each.record.target is None else str(each.record.target)
        place, names = str(each.record.place), sorted(each.names)
        found.append([*at.id, at.attempt, place, target, names, each.world_size, details, _runs(lacking)])
    return {"found": found, "rejected": [[each.kind.name, str(each.place), each.why] for each in rejected]}


def candidates(tier: "StorageTier", message: JSON, rank: int, token: str) -> Candidates:
    """The checkpoints in a message in which a rank finds all that it can expect; they are opened when one is chosen."""
    found = Candidates()
    for history, step, attempt, place, target, names, world_size, details, lacking in message["found"]:
        if not any(first <= rank <= last for first, last in lacking):
            entry = StoredEntry.of(tier, SaveId(history, step), place, target, token)
            location = CheckpointLocation(history, step, tier.name, 0, attempt)
            found[location] = Candidate(tier, {}, details, world_size, entry, frozenset(names))
    return found


def rejected(tier: "StorageTier", message: JSON) -> list[Rejected]:
    """Return the checkpoints that exist there and are no candidates for any rank."""
    found = []
    for name, place, why in message["rejected"]:
        kind = RejectionKind[name]
        damaged = tier if kind is RejectionKind.DAMAGED else None
        found.append(Rejected(kind, place if tier.is_far else Path(place), why, damaged))
    return found


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as runs, each with its first and last one."""
    all_of = [*numbers]
    breaks = [0, *(i for i, (a, b) in enumerate(pairwise(all_of), 1) if b > a + 1), len(all_of)]
    return [[all_of[start], all_of[end - 1]] for start, end in pairwise(breaks)] if all_of else []
