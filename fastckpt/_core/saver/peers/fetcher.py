"""Brings files of a save from other agents' memory into a slot of this one."""

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.format.manifest import COMMON, OF_EACH_NODE
from fastckpt._core.ipc.sealed import SealedConnection, reading
from fastckpt._core.memory import slots
from fastckpt._core.memory.parity_records import files_in
from fastckpt._core.memory.records import make_folders
from fastckpt._core.memory.slots import SlotDone
from fastckpt._core.policy.replicas.grouping import Group
from fastckpt._core.saver.peers.file_transfer import LIST, TIMEOUT, SaveName, fetch, parts_of
from fastckpt._core.saver.peers.parity_rebuild import rebuild
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")

STREAMS = 4
"""Files that are fetched at once."""


@dataclass(frozen=True)
class Offer:
    """Files of a save that another agent holds, and those that others can rebuild with it."""

    address: str
    sizes: Mapping[str, int]
    parts: Mapping[int, SlotDone]
    parity: Sequence["OfferedParity"] = ()


@dataclass(frozen=True)
class OfferedParity:
    """Parity of a group: its members, the one that has this parity, and the sizes of the others' files, by member."""

    group: Group
    own: str
    sizes: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class FetchedFiles:
    """Files that have been fetched into one directory.

    Attributes:
        sizes: Bytes of each, by name.
        digests: Their xxh3-128.
        parts: The records of ranks that the other agents have, by rank.
    """

    sizes: Mapping[str, int]
    digests: Mapping[str, str]
    parts: Mapping[int, SlotDone] = field(default_factory=dict)

    @property
    def details(self) -> dict[str, Any]:
        """The details of the first rank of which there is a record."""
        return dict(self.parts[min(self.parts)].details) if self.parts else {}


def survey(save: SaveName, sources: Mapping[str, Sequence[str]], secret: bytes) -> list[Offer]:
    """Return the offer of each source; sources that do not answer are left out."""
    addresses = dict.fromkeys(address for addresses in sources.values() for address in addresses)

    def ask(address: str) -> Offer | None:
        try:
            with contextlib.closing(SealedConnection.connect(address, secret, TIMEOUT)) as link, reading("its answer"):
                answer = link.ask(save.request(LIST))
                parts = parts_of({**answer, "id": list(save.id)})
                sizes = {str(name): int(size) for name, size in answer["files"].items()}
                return Offer(address, sizes, parts, [_offered(*each) for each in answer.get("parity") or ()])
        except (FastckptError, OSError) as error:
            logger.warning("%s cannot be fetched from %s: %s", save.id, address, error)
        return None

    with ThreadPoolExecutor(STREAMS, "fastckpt-fetch") as pool:
        return [offer for offer in pool.map(ask, addresses) if offer]


def sizes_of(offers: Sequence[Offer], names: Collection[str]) -> dict[str, int]:
    """Bytes of the files of these names, by the first offer that has each; raises FastckptError if none has."""
    parity = [each for offer in offers for each in offer.parity]
    rebuilt = {name: size for each in parity for of in each.sizes.values() for name, size in of.items()}
    found = {name: size for name, size in rebuilt.items() if name in names}
    found |= {name: offer.sizes[name] for offer in reversed(offers) for name in names if name in offer.sizes}
    if missing := sorted(set(names) - found.keys()):
        raise FastckptError(f"no other node has {missing[0]} any more")
    return found


def _offered(group: Sequence[str], own: str, members: Mapping[str, Any]) -> OfferedParity:
    sizes = {str(member): {name: size for name, size, _ in files_in(files)} for member, files in members.items()}
    return OfferedParity(tuple(map(str, group)), str(own), sizes)


def fetch_all(
    save: SaveName,
    root: Path,
    sources: Mapping[str, Sequence[str]],
    offers: Sequence[Offer],
    secret: bytes,
) -> FetchedFiles:
    """Fetch each file from the first of its sources that has it undamaged; rebuild files that none of them gives.

    Raises FastckptError or OSError if there is none for a file, or no memory for it.

    Args:
        save: The save.
        root: The directory that they come into.
        sources: The addresses of agents that may have each file.
        offers: Their offers.
        secret: The secret of the round.
    """
    sizes = sizes_of(offers, sources.keys())
    known = {offer.address: offer for offer in offers}

    def bring(name: str) -> str | Exception:
        return _from_any(save, root, name, [known[a] for a in sources[name] if a in known], secret)

    with metrics.phase("peers.fetch", step=save.id.step), ThreadPoolExecutor(STREAMS, "fastckpt-fetch") as pool:
        found = dict(zip(sources, pool.map(bring, sources), strict=True))
    digests = {name: digest for name, digest in found.items() if isinstance(digest, str)}
    failures = [failure for failure in found.values() if isinstance(failure, Exception)]
    for (group, member), parity in _rebuildable(offers).items():
        if lacking := parity.sizes.keys() & (sizes.keys() - digests.keys()):
            try:
                digests |= rebuild(save, member, group, root, parity.holders, secret)
                sizes |= {name: parity.sizes[name] for name in lacking}
            except (FastckptError, OSError) as failure:
                logger.warning("%s of another node was not rebuilt from parity: %s", save.id, failure)
                failures.append(failure)
    if not sizes.keys() <= digests.keys():
        raise failures[-1]
    for name in digests.keys() - sizes.keys():  # of other ranks of that node
        (root / name).unlink()
        del digests[name]
    parts = {rank: part for offer in reversed(offers) for rank, part in offer.parts.items()}
    return FetchedFiles(sizes, digests, parts)


@dataclass(frozen=True)
class _Rebuildable:
    """The sizes of a member's files that its group has parity of, and where the other members' memory is now."""

    sizes: dict[str, int] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)


def _rebuildable(offers: Sequence[Offer]) -> dict[tuple[Group, str], _Rebuildable]:
    """Return the files that can be rebuilt, for each member of each group that has made parity of the save."""
    found: dict[tuple[Group, str], _Rebuildable] = {}
    for offer in offers:
        for each in offer.parity:
            for member, sizes in each.sizes.items():
                known = found.setdefault((each.group, member), _Rebuildable())
                known.sizes.update(sizes)
                known.holders[each.own] = offer.address
    return found


def _from_any(save: SaveName, root: Path, name: str, offers: Sequence[Offer], secret: bytes) -> str | Exception:
    """The xxh3-128 of a file that has come from the first of its sources that gives it; why none does, else."""
    error: Exception = FastckptError(f"no other node has {name} any more")
    for offer in offers:
        if name not in offer.sizes:
            continue
        try:
            with contextlib.closing(SealedConnection.connect(offer.address, secret, TIMEOUT)) as link:
                digest = fetch(link, save, name, offer.sizes[name], root)
        except (FastckptError, OSError) as failure:
            logger.warning("%s of %s was not fetched from %s: %s", name, save.id, offer.address, failure)
            error = failure
        else:
            metrics.counts["peers.bytes"] += offer.sizes[name]
            return digest
    return error


def with_kept(slot: Path, kept: Path, save: SaveName, fetched: FetchedFiles, ranks: Sequence[int]) -> FetchedFiles:
    """Add to the fetched files those of this node's ranks that it has kept for another node; they move into the slot.

    Raises OSError.

    Args:
        slot: Slot of the files.
        kept: Directory in which this node keeps files of other nodes' ranks of that save.
        save: The save.
        fetched: Files that were fetched.
        ranks: The numbers of this node's ranks among those of all nodes.
    """
    parts = {r: part for r, part in slots.read_parts(kept).items() if r in ranks and part.id == save.id}
    known, moved = slots.read_digests(kept, save.id), dict[str, int]()
    for part in parts.values():
        common = part.details.get(OF_EACH_NODE, COMMON)
        lacking = {n: size for n, size in part.files.items() if n not in common and n not in fetched.sizes}
        if lacking.keys() <= known.keys() and not slots.damage(kept, lacking):
            moved |= lacking
    for name in moved:
        make_folders(slot, (slot / name).parent)
        (kept / name).rename(slot / name)
    digests = {**fetched.digests, **{name: known[name] for name in moved}}
    return FetchedFiles({**fetched.sizes, **moved}, digests, {**parts, **fetched.parts})


def make_ours(slot: Path, save: SaveName, fetched: FetchedFiles, ranks: Sequence[int], node: int) -> bool:
    """Commit fetched files as if this node's ranks had saved them; False if records or files of some are missing.

    Files of other ranks that these ranks need are not part of the commit: they are kept beside it.

    Args:
        slot: Slot with the files, and nothing else.
        save: The save of these files.
        fetched: The files.
        ranks: The numbers of this node's ranks among those of all nodes, in their local order.
        node: The rank of this node.
    """
    common = set(fetched.details.get(OF_EACH_NODE, COMMON)) & fetched.sizes.keys()
    records = {}
    for local, rank in enumerate(ranks):
        if (part := fetched.parts.get(rank)) is None:
            return False
        own = part.files.keys() - common | (common if local == 0 else set())
        if not own <= fetched.sizes.keys():
            return False
        details = part.details | ({"node": node} if "node" in part.details else {})
        records[local] = SlotDone(save.id, {name: fetched.sizes[name] for name in sorted(own)}, details)
    ours = {name for record in records.values() for name in record.files}
    slots.begin(slot, slots.SlotBegin(save.id, frozenset(records)))
    slots.write_digests(slot, save.id, {name: digest for name, digest in fetched.digests.items() if name in ours})
    for local, record in records.items():
        slots.commit(slot, local, record)
    return True
