"""Tiers, the places that hold checkpoints, with one protocol; the memory of this node, and memory with storage."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.config import RankInfo
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.read_errors import Phase, ReadVerdict, in_words, verdict
from fastckpt._core.memory import slots
from fastckpt._core.memory.held_saves import HeldSave, held_saves
from fastckpt._core.policy.resume import MEMORY, MIXED, PEER, CheckpointLocation
from fastckpt._core.storage.local.stored import digest
from fastckpt.errors import BadCheckpoint, FastckptError

if TYPE_CHECKING:
    from fastckpt._core.resume.storage_tier import StorageTier

OTHER_KIND = "is of another kind of checkpointer"
Files = dict[str, Path]
"""Paths of the files of a checkpoint, by name."""


class Fault(NamedTuple):
    """The reason why a rank did not get a file: the value of a `ReadVerdict`, and the error in words."""

    verdict: str
    why: str

    @classmethod
    def of(cls, error: BaseException, phase: Phase, tier: str) -> "Fault":
        """Return the fault for an error in a phase of a load from a tier."""
        return cls(verdict(error, phase, tier).value, in_words(error))

    @property
    def is_damage(self) -> bool:
        """Return whether it is a reason to reject a checkpoint."""
        return self.verdict == ReadVerdict.DAMAGE.value


Faults = dict[str, Fault]
"""Names of files, and the fault of each; "" stands for the whole checkpoint."""


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
        files: Paths of its files, which those on storage have once they are opened; a file to download exists once it
            was checked.
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
        """Check these files, several at once; returns those that differ from the saved ones, and why."""
        with ThreadPoolExecutor(max(1, min(threads, len(names))), "fastckpt-verify") as pool:
            found = zip(names, pool.map(self._fault, names), strict=True)
            return {name: fault for name, fault in found if fault}

    def _fault(self, name: str) -> Fault | None:
        try:
            self.tier.check(self, name)
        except (FastckptError, OSError, MemoryError) as error:
            return Fault.of(error, Phase.READING, self.tier.name)
        return None


Candidates = dict[CheckpointLocation, Candidate]


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a tier, or of all.

    Attributes:
        held: All that is in memory of saves of several nodes, even if it is enough for no rank.
    """

    candidates: Candidates = field(default_factory=dict)
    rejected: Sequence[Rejected] = ()
    held: Sequence[tuple[CheckpointLocation, HeldSave]] = ()


class Tier(Protocol):
    """A place that holds checkpoints. Its ``name`` is that in events, and ranks it: see `policy.resume.TIERS`."""

    name: str

    def list(self) -> Listing:
        """List its checkpoints, with the files of each; raises FastckptError or OSError."""
        ...

    def open(self, candidate: Candidate) -> Candidate:
        """The candidate with all its files, once it is chosen; raises FastckptError or OSError."""
        ...

    def check(self, candidate: Candidate, name: str) -> None:
        """Raise BadCheckpoint, PersistError or OSError if the file of that name differs from the saved one."""
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
        place, several = self._client.place, list[tuple[CheckpointLocation, HeldSave]]()
        for held in held_saves(self._client.arena, self._client.pin()):
            attempt = attempt_of(held.details, place)
            location = CheckpointLocation(*held.id, self.name, place.group_rank, attempt)
            if attempt:
                several.append((location, held))
            if held.slot is None:
                continue
            if place.group_world_size > 1 and not attempt:
                why = "the other nodes may have another of this step"
                rejected.append(Rejected(RejectionKind.PARTIAL, f"{held.id} in {held.slot}", why))
                continue
            if self._main not in held.files:
                rejected.append(Rejected(RejectionKind.OTHER_KIND, held.slot))
            details = dict(held.details)
            candidates[location] = Candidate(self, held.files, details, details.get("world_size", 1), held)
        return Listing(candidates, rejected, held=several)

    def open(self, candidate: Candidate) -> Candidate:
        """The same: its files are known."""
        return candidate

    def check(self, candidate: Candidate, name: str) -> None:
        """Compare the size of an image, and its digest unless the saver has compared it."""
        held, root = candidate.record, candidate.record.roots[name]
        if root == held.slot and slots.read(root).committed != held.id:
            raise BadCheckpoint(f"{root} does not hold {held.id} any more")  # files of other nodes have its place
        if damage := slots.damage(root, {name: held.sizes[name]}):
            raise BadCheckpoint(damage)
        if not self._digests or root in self._client.verified or name not in held.digests:
            return
        if (now := digest(root / name)) != held.digests[name]:
            before = f"it was {held.digests[name]} once it was committed"
            raise BadCheckpoint(f"{root / name} is damaged: its xxh3-128 is {now}; {before}")

    def reject(self, candidate: Candidate, faults: Faults, threads: int) -> None:
        """Have the saver give up a candidate."""
        self.given_up.append(candidate.record.id)

    def drop(self, candidate: Candidate) -> None:
        """Do nothing: the slots stay as they are until they are released."""


class PeerTier:
    """The memory of other nodes, from which the agents have brought files into that of this one."""

    name = PEER

    def __init__(self, client: SaverClient) -> None:
        self._client = client

    def list(self) -> Listing:
        """List nothing: each node reports its files, and all know by that which they could fetch."""
        return Listing()

    def fetch(
        self, location: CheckpointLocation, sources: Mapping[str, Sequence[str]], held: Files, *, beside: bool
    ) -> Candidate:
        """Have the files brought, each from the first of its sources that has it undamaged; raises FastckptError.

        Args:
            location: The save.
            sources: The addresses of agents that hold each file that this node lacks.
            held: The files of the save that are in this node's memory.
            beside: True if they are for a load alone, beside the slots.
        """
        save = SaveId(*location.id)
        fetched = self._client.fetch(save, location.attempt, sources, beside=beside)
        files = {**held, **{name: Path(path) for name, path in fetched.files.items()}}
        return Candidate(self, files, fetched.details, fetched.details.get("world_size", 1), fetched)

    def open(self, candidate: Candidate) -> Candidate:
        """The same: its files are known."""
        return candidate

    def check(self, candidate: Candidate, name: str) -> None:
        """Compare the size of a file; the agent has compared its digest as it came."""
        size = candidate.record.sizes.get(name)
        if size is not None and (there := candidate.files[name].stat().st_size) != size:
            raise BadCheckpoint(f"{candidate.files[name]} has {there} bytes; {size} came from another node")

    def reject(self, candidate: Candidate, faults: Faults, threads: int) -> None:
        """Do nothing: the nodes that hold it judge it themselves."""

    def drop(self, candidate: Candidate) -> None:
        """Do nothing: the saver takes its slot again."""


def attempt_of(details: Mapping[str, Any], place: RankInfo) -> str:
    """The token of a save, if it or this job is one of several nodes; else the step alone distinguishes saves."""
    alone = place.group_world_size == 1 and details.get("nodes", 1) == 1
    return "" if alone else str(details.get("attempt", ""))


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
                joined = Candidate(self, here.files, here.details, here.world_size, (here, stored))
                found[location._replace(tier=MIXED)] = joined
        return Listing(found)

    def open(self, candidate: Candidate) -> Candidate:
        """Add the files of the durable part."""
        here, stored = candidate.record
        stored = stored.tier.open(stored)
        return replace(candidate, files={**stored.files, **here.files}, record=(here, stored))

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
