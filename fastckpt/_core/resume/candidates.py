"""Finds the checkpoints that a rank could load from a directory, in all tiers."""

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastckpt._core.client.connection import SaverClient
from fastckpt._core.config import RankInfo
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import file_named
from fastckpt._core.memory.held_saves import HeldSave
from fastckpt._core.memory.parity_records import ParityRecord, whole_parities
from fastckpt._core.policy.peer_sources import NodeHolding, ParityHolding
from fastckpt._core.policy.resume import REMOTE, STORAGE, CheckpointLocation
from fastckpt._core.resume.storage_tier import RemoteTier, StorageTier
from fastckpt._core.resume.stored_entries import StoredEntry, candidates, described, rejected
from fastckpt._core.resume.tiers import (
    Candidate,
    Candidates,
    Faults,
    Listing,
    MemoryTier,
    MixedTier,
    PeerTier,
    Rejected,
    RejectionKind,
)
from fastckpt._core.storage.local.stored import Stored, ours, read_manifest
from fastckpt._core.storage.store import StoredCheckpoint, is_url, normalised
from fastckpt.errors import BadCheckpoint

_STEP = re.compile("/checkpoint-[0-9]+(/|$)")


@dataclass(frozen=True)
class RequiredFiles:
    """The files that a rank needs of a checkpoint.

    Attributes:
        main: Name of the file that each checkpoint has.
        own: Name of the file with this rank's own part; a checkpoint of fewer ranks may lack it.
        shards: Names of the files without which the memory of one of several nodes is not enough for this rank; empty
            if ``main`` is all that ranks have in common. It is enough for the same number of ranks only.
        from_peers: True if the files that all nodes have alike and those that a rank has written, or its ``shards``,
            are all that it needs: these can come from other nodes' memory.
        may_redivide: True if ranks can load a save of another number of ranks, and then bring the files they need.
        allow_lost: True if a rank may load a save in memory without its own file, if no node has that any more.
    """

    main: str
    own: str
    shards: tuple[str, ...] = ()
    from_peers: bool = False
    may_redivide: bool = False
    allow_lost: bool = False

    @property
    def divided(self) -> list[str]:
        """The files besides ``main`` that this rank needs of a save of as many ranks; [] if all have one state."""
        return [*self.shards, *([self.own] if self.own != self.main else [])] if self.shards else []

    def are_in(self, candidate: Candidate, place: RankInfo) -> bool:
        """Return whether this rank finds all that it can expect of a checkpoint of that many ranks."""
        files = candidate.files
        return self.main in files and (self.own in files or place.rank >= candidate.world_size)

    def are_in_memory(self, candidate: Candidate, place: RankInfo) -> bool:
        """Return whether the memory of a node, one of those that saved it, has all that this rank needs."""
        alone = not self.shards or candidate.details.get("nodes", 1) == 1
        shards = candidate.world_size == place.world_size and all(name in candidate.files for name in self.shards)
        return self.are_in(candidate, place) and (alone or shards)


class CandidateFinder:
    """Finds the checkpoints that one rank could load from a directory.

    Args:
        location: The checkpoint directory: a path, or the URL of a store.
        needs: Files that this rank needs of a checkpoint.
        digests: True if files are checked by their digests, where there are some, or by their sizes alone.

    Attributes:
        has_far: True if a durable tier is a store that is reached over a network.
    """

    def __init__(self, client: SaverClient, location: str, needs: RequiredFiles, *, digests: bool) -> None:
        self.directory = location
        self._client, self._needs, self._digests = client, needs, digests
        self._memory = MemoryTier(client, needs.main, digests=digests)
        self._peers = PeerTier(client)
        self._durable = [StorageTier(STORAGE, location, client, digests=digests)]
        if client.options.remote:
            self._durable.append(RemoteTier(REMOTE, client.options.remote, client, digests=digests))
        self._others: list[StorageTier] = []
        self.has_far = any(tier.is_far for tier in self._durable)

    def in_memory(self) -> Listing:
        """All that this node has in memory, even if it is not enough for this rank; it stays until it is released."""
        return self._memory.list()

    def find_near(self) -> Listing:
        """The checkpoints of `find` that memory alone has."""
        here = self._memory.list()
        return Listing(self._enough(here), held=here.held)

    def search(self, own: Sequence[str]) -> tuple[dict[str, Any], list[Rejected]]:
        """Search the durable tiers, for all ranks; the first rank calls it.

        Checkpoints are published that nodes have written whole and none has published.

        Args:
            own: The file that each rank has of its own.

        Returns:
            The checkpoints, as a message to all ranks; and the unfinished ones.

        Raises FastckptError or OSError if a tier cannot be searched.
        """
        listings, unfinished = [tier.list() for tier in self._durable], list[Rejected]()
        for number, tier in enumerate(self._durable):
            published, lacking = tier.settle()
            unfinished += lacking
            if published:
                listings[number] = tier.list()
        tiers = [described(listing, self._needs.main, own) for listing in listings]
        return {"tiers": tiers, "token": f"manifest-{secrets.token_hex(8)}"}, unfinished

    def find(self, here: Listing, found: Mapping[str, Any]) -> Listing:
        """All checkpoints that hold the files that this rank needs.

        Args:
            here: Checkpoints in memory.
            found: Checkpoints on storage, as `search` has found them in the first rank.
        """
        # 1. keep those with this rank's files   2. add saves of which memory has some files and storage the
        # others   3. name the reason for all the rest: none may be passed over silently
        tiers = [*zip(self._durable, found["tiers"], strict=True)]
        durable = [candidates(tier, each, self._client.place.rank, found["token"]) for tier, each in tiers]
        mixed = MixedTier(here.candidates, durable).list().candidates
        all_of = {location: each for tier in durable for location, each in tier.items()}
        all_of |= self._enough(here) | mixed
        bad = [*here.rejected, *(each for tier, message in tiers for each in rejected(tier, message))]
        for location in sorted(here.candidates.keys() - all_of.keys()):
            if location._replace(tier=MixedTier.name) not in mixed:
                text = f"{SaveId(*location.id)} in {location.where}"
                bad.append(Rejected(RejectionKind.PARTIAL, text, "has not all of it"))
        return Listing(all_of, bad, here.held)

    def holdings(self, listing: Listing, select: Callable[[Candidates], list[CheckpointLocation]]) -> list[NodeHolding]:
        """Return this node's files in memory of saves of several nodes, for the other nodes.

        The first rank of the node reports it.
        """
        place = self._client.place
        is_alone = place.group_world_size == 1 and not self._needs.shards  # else others may have left it their shards
        if place.local_rank or is_alone or not self._needs.from_peers:
            return []
        known = {
            at: Candidate(self._memory, each.files, each.details, 1, each) for at, each in listing.held if each.slot
        }
        wanted = select(known)
        found = []
        for at, held in listing.held:
            ranks = {
                r: own for r, part in held.parts.items() if held.files.keys() >= (own := set(part.files) - held.common)
            }
            found.append(
                NodeHolding(
                    place.group_rank,
                    *held.id,
                    at.attempt,
                    held.details.get("node", 0) if held.slot else -1,
                    held.details.get("world_size", 1),
                    self._client.alike,
                    at in wanted,
                    self._client.address,
                    tuple(sorted(held.common & held.files.keys())),
                    {rank: tuple(sorted(own)) for rank, own in ranks.items()},
                    parity_holdings(self._client.arena, held),
                )
            )
        return found

    @property
    def needs(self) -> RequiredFiles:
        """Files of a checkpoint that this rank needs."""
        return self._needs

    def fetch(
        self, location: CheckpointLocation, sources: Mapping[str, Sequence[str]], listing: Listing, *, beside: bool
    ) -> Candidate:
        """The candidate at a peer's, once this node's agent has brought it; raises FastckptError.

        With ``beside`` the files are brought for a load alone: they are not all that this node has of the save.
        """
        held = next((held for at, held in listing.held if at.save == location.save), None)
        if held is not None and not sources:  # all is here but files that nobody has
            return Candidate(self._memory, held.files, held.details, held.details.get("world_size", 1), held)
        return self._peers.fetch(location, sources, held.files if held else {}, beside=beside)

    def held(self, listing: Listing) -> dict[CheckpointLocation, bool]:
        """Checkpoints in this node's memory, and whether each is enough for this rank."""
        place = self._client.place
        return {location: self._needs.are_in_memory(each, place) for location, each in listing.candidates.items()}

    def look_at(self, path: str) -> list[Any]:
        """The checkpoint at a path or URL, as a message from the first rank to all: see `at`.

        Raises FastckptError or OSError if there is none.
        """
        save, found = self._at(path)
        if found.record is None:
            return [None, self.directory, {name: str(file) for name, file in found.files.items()}]
        stored, target = found.record, None if found.record.target is None else str(found.record.target)
        place = [*stored.id, str(stored.place), target, f"manifest-{secrets.token_hex(8)}"]
        return [list(save or ()), found.tier.location, place]  # type: ignore[attr-defined]

    def at(self, message: Sequence[Any]) -> tuple[SaveId | None, Candidate]:
        """The checkpoint that the first rank has found: one of ours, or files that something else wrote."""
        save, location, found = message
        if save is None:
            files = {name: Path(file) for name, file in found.items()}
            return None, Candidate(self._durable[0], files, {}, 1, None)
        history, step, place, target, token = found
        tier = self._durable[0] if location == self._durable[0].location else self._tier_of(location)
        entry = StoredEntry.of(tier, SaveId(history, step), place, target, token)
        return SaveId(*save), Candidate(tier, {}, {}, 1, entry)

    def is_elsewhere(self, candidate: Candidate) -> bool:
        """Return whether the result of `at` is of another checkpoint directory."""
        place = str(candidate.record.place) if candidate.record else ""
        return not any(place.startswith(f"{tier.location}/") for tier in self._durable)

    def reject(self, bad: list[tuple[Candidate, Faults]], damaged: list[Rejected], threads: int) -> None:
        """Quarantine or give up bad and damaged checkpoints, and report that to the saver of each node.

        Args:
            bad: Candidates, and their files that some rank found bad.
            damaged: Checkpoints that this rank saw to be damaged when it listed the tiers.
            threads: Number of files that are checked at once.
        """
        for candidate, faults in bad:
            candidate.tier.reject(candidate, faults, threads)
        for each in damaged:
            if each.tier is not None:
                each.tier.quarantine(each.place, each.why)
        memory, storage = self._memory.given_up, any(tier.has_quarantined for tier in self._durable)
        if self._client.place.local_rank == 0 and (memory or storage):
            self._client.report_bad([list(save) for save in memory], storage=storage)
        memory.clear()
        for tier in self._durable:
            tier.has_quarantined = False

    def close(self) -> None:
        """Remove downloads, once no local rank needs them any more, and disconnect."""
        for tier in (*self._durable, *self._others):
            tier.close()

    def _at(self, path: str) -> tuple[SaveId | None, Candidate]:
        """The checkpoint at a path or URL."""
        if is_url(path):
            return self._at_url(normalised(path))
        place, storage = Path(normalised(path)), self._durable[0]
        main = place / self._needs.main if place.is_dir() else place
        listing = Listing() if storage.is_far else storage.list()
        for location, each in listing.candidates.items():
            if self._needs.main in each.files and _is_file_of(each.record, self._needs.main, main):
                return SaveId(*location.id), each
        if record := self._record_of(main, listing):
            return record.id, self._tier_of(str(record.place.parent)).candidate(record)
        files = {found.name: found for found in place.iterdir()} if place.is_dir() else {}
        return None, Candidate(storage, {**files, self._needs.main: main}, {}, 1, None)

    def _enough(self, listing: Listing) -> Candidates:
        """Return the candidates in memory that are enough for this rank."""
        place = self._client.place
        return {at: each for at, each in listing.candidates.items() if self._needs.are_in_memory(each, place)}

    def _tier_of(self, location: str) -> StorageTier:
        """The storage tier of another checkpoint directory."""
        self._others.append(StorageTier(STORAGE, location, self._client, digests=self._digests))
        return self._others[-1]

    def _record_of(self, main: Path, listing: Listing) -> Stored | None:
        """The manifest of a file that no checkpoint of this directory has: it must not be loaded unchecked.

        Another directory may have it; or its user named it, and the rest of its checkpoint is bad or in quarantine.
        """
        beside = read_manifest(main.parent)
        if main.name == self._needs.main and beside:
            return Stored(beside, main.parent, None)
        records = []
        for bad in listing.rejected:
            if str(bad.place) == str(main):
                raise BadCheckpoint(bad.why)
            manifest = ours(bad.place) if isinstance(bad.place, Path) else None
            named = file_named(manifest.target) if manifest else ""
            if manifest and named and os.path.realpath(Path(self.directory, named)) == str(main):
                records.append(Stored(manifest, Path(str(bad.place)), main))
        return max(records, key=lambda record: record.id, default=None)

    def _at_url(self, url: str) -> tuple[SaveId, Candidate]:
        """The newest checkpoint that is stored at a URL, below it, or whose model was copied there."""
        match = _STEP.search(url)
        outside = match is not None and not url.startswith(f"{self.directory}/")
        root = url[: match.start()] if match and outside else self.directory
        tier = self._tier_of(root) if outside else self._durable[0]
        for location, each in tier.list().candidates.items() if is_url(root) else ():
            if any(f"{where}/".startswith(f"{url}/") for where in (each.record.place, each.record.path)):
                return SaveId(*location.id), each
        raise BadCheckpoint(f"{url} is no checkpoint of ours in {root}")


def _is_file_of(stored: StoredCheckpoint, name: str, path: Path) -> bool:
    """Return whether a file is this checkpoint's, in its place or at the path that its user named."""
    assert isinstance(stored, Stored)
    named = stored.target is not None and os.path.realpath(stored.target) == str(path)
    return os.path.realpath(stored.path_of(name)) == str(path) or (named and stored.owns_target())


def parity_holdings(arena: Path, held: HeldSave) -> tuple[ParityHolding, ...]:
    """Return the rebuilds of a save that a node can help with.

    The files of its ranks that the node lacks are in its parity.
    """
    if held.slot is None:
        return ()
    return tuple(_parity_holding(held, each) for each in whole_parities(arena, held.id, held.attempt))


def _parity_holding(held: HeldSave, record: ParityRecord) -> ParityHolding:
    ranks = dict[str, dict[int, tuple[str, ...]]]()
    for member, known in record.members.items():
        names = {name for name, _, _ in known.files}
        own = {rank: {*part.files} - held.common for rank, part in held.parts.items()}
        ranks[member] = {
            rank: tuple(sorted(files))
            for rank, files in own.items()
            if not files <= held.files.keys() and files <= held.files.keys() | names
        }
    return ParityHolding(record.group, record.own, ranks)
