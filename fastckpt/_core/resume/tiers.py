"""Tiers, the places that hold checkpoints, with one protocol; the memory of this node, and memory with storage."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.policy.resume import MEMORY, MIXED, CheckpointLocation
from fastckpt._core.storage.local.stored import digest
from fastckpt.errors import BadCheckpoint, PersistError

if TYPE_CHECKING:
    from fastckpt._core.resume.storage_tier import StorageTier

OTHER_KIND = "is of another kind of checkpointer"
Files = dict[str, Path]
"""Paths of the files of a checkpoint, by name."""
Faults = dict[str, str]
"""Names of files, and the fault of each."""


class RejectionKind(Enum):
    """Reasons why a checkpoint that exists is no candidate, in words."""

    DAMAGED = "{place}: {why}"
    QUARANTINED = "{place}, quarantined before: {why}"
    OTHER_KIND = f"{{place}} {OTHER_KIND}"
    PARTIAL = "{place} ({why})"
    UNFINISHED = "{place} on storage: {why}"


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that exists and is no candidate; ``place`` is its location, or its id."""

    kind: RejectionKind
    place: Path | str | SaveId
    why: str = ""
    tier: "StorageTier | None" = None

    def __str__(self) -> str:
        return self.kind.value.format(place=self.place, why=self.why)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that this rank could load.

    Attributes:
        tier: The tier that holds it.
        files: Paths of its files; a file to download exists once it was checked.
        details: The details saved with it.
        world_size: The number of ranks that saved it.
        record: The tier's own record of it.
        names: Names of its directories on storage: one save may have been persisted under several names.
    """

    tier: "Tier"
    files: Files
    details: Mapping[str, Any]
    world_size: int
    record: Any
    names: frozenset[str] = frozenset()

    def faults(self, names: Sequence[str], threads: int) -> Faults:
        """Check these files, several at once; returns those that differ from what was saved, and why."""
        with ThreadPoolExecutor(max(1, min(threads, len(names))), "fastckpt-verify") as pool:
            found = zip(names, pool.map(self._fault, names), strict=True)
            return {name: why for name, why in found if why}

    def _fault(self, name: str) -> str:
        try:
            self.tier.check(self, name)
        except (BadCheckpoint, PersistError, OSError) as error:
            return f"{type(error).__name__}: {error}"[:500]
        return ""


Candidates = dict[CheckpointLocation, Candidate]


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a tier, or of all; ``published``: parts of nodes were published meanwhile, so look again."""

    candidates: Candidates = field(default_factory=dict)
    rejected: Sequence[Rejected] = ()
    published: bool = False


class Tier(Protocol):
    """A place that holds checkpoints. Its ``name`` is that in events, and ranks it: see `policy.resume.TIERS`."""

    name: str

    def list(self) -> Listing:
        """List its checkpoints, with the files of each; raises FastckptError or OSError."""
        ...

    def check(self, candidate: Candidate, name: str) -> None:
        """Raise BadCheckpoint, PersistError or OSError if the file of that name differs from what was saved."""
        ...

    def reject(self, candidate: Candidate, faults: Faults, threads: int) -> None:
        """Never list a candidate again: some rank found these files bad."""
        ...

    def drop(self, candidate: Candidate) -> None:
        """Remove the download of a candidate: the next one needs the room."""
        ...


class MemoryTier:
    """The shared memory of this node; ``main`` is the file that each checkpoint of the same kind has.

    Attributes:
        given_up: Rejected checkpoints that the saver does not know of yet.
    """

    name = MEMORY

    def __init__(self, client: SaverClient, main: str, *, digests: bool) -> None:
        self._client, self._main, self._digests = client, main, digests
        self.given_up: list[SaveId] = []

    def list(self) -> Listing:
        """List the committed checkpoints of this node, even if not enough for this rank; they stay until released."""
        candidates, rejected = Candidates(), list[Rejected]()
        place = self._client.place
        for slot in self._client.pin():
            records = slots.read(slot)
            if (save := records.committed) is None:
                continue
            details = records.details
            attempt = details.get("attempt", "")
            if place.group_world_size > 1 and not attempt:
                why = "the other nodes may have another of this step"
                rejected.append(Rejected(RejectionKind.PARTIAL, f"{save} in {slot}", why))
                continue
            files = {name: slot / name for name in records.files}
            if self._main not in files:
                rejected.append(Rejected(RejectionKind.OTHER_KIND, slot))
            location = CheckpointLocation(*save, self.name, place.group_rank, attempt)
            record = slot, save, records.files, records.digests
            candidates[location] = Candidate(self, files, details, details.get("world_size", 1), record)
        return Listing(candidates, rejected)

    def check(self, candidate: Candidate, name: str) -> None:
        """Compare the size of an image, and its digest unless the saver has compared it."""
        slot, _, sizes, digests = candidate.record
        if damage := slots.damage(slot, {name: sizes[name]}):
            raise BadCheckpoint(damage)
        if not self._digests or slot in self._client.verified or name not in digests:
            return
        if (now := digest(slot / name)) != digests[name]:
            before = f"it was {digests[name]} once it was committed"
            raise BadCheckpoint(f"{slot / name} is damaged: its xxh3-128 is {now}; {before}")

    def reject(self, candidate: Candidate, faults: Faults, threads: int) -> None:
        """Have the saver give up a candidate."""
        self.given_up.append(candidate.record[1])

    def drop(self, candidate: Candidate) -> None:
        """Do nothing: the slots stay as they are until they are released."""


class MixedTier:
    """Memory for the files that it has, and a durable tier for the others of the same save."""

    name = MIXED

    def __init__(self, memory: Candidates, durable: Sequence[Candidates]) -> None:
        self._memory, self._durable = memory, durable

    def list(self) -> Listing:
        """List saves of which a durable tier, the nearest such, has the same attempt: equal steps do not suffice."""
        of_save = {(*c[:2], c.attempt): stored for tier in reversed(self._durable) for c, stored in tier.items()}
        found = Candidates()
        for location, here in self._memory.items():
            if location.attempt and (stored := of_save.get((*location[:2], location.attempt))):
                both = {**stored.files, **here.files}
                joined = Candidate(self, both, here.details, here.world_size, (here, stored))
                found[location._replace(tier=MIXED)] = joined
        return Listing(found)

    def check(self, candidate: Candidate, name: str) -> None:
        """Check the file in the tier that has it."""
        here, stored = candidate.record
        part = here if name in here.files else stored
        part.tier.check(part, name)

    def reject(self, candidate: Candidate, faults: Faults, threads: int) -> None:
        """Do nothing: each of both tiers is judged by itself."""

    def drop(self, candidate: Candidate) -> None:
        """Remove the download of the durable part."""
        _, stored = candidate.record
        stored.tier.drop(stored)
