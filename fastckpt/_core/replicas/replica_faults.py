"""Decides, of the digests of all ranks, what they have unlike, and whether a processor has computed it wrongly.

A weight that was equal on all its replicas, and is not any more, is silent data corruption: Dixit et al., "Silent Data
Corruptions at Scale" (2021), sections 3 and 5. Nothing but a majority of three replicas or more tells which is wrong.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

SHARD = " (shard of rank "
"""What the name of a shard has after that of the entry: the first rank that has a replica of it."""
Digests = Mapping[str, str]
"""Of each entry, by name: its type and shape, and after a colon a digest of its bytes."""


class ReplicaFault(NamedTuple):
    """Replicas that were equal, and are not any more.

    Attributes:
        names: Of the entries, sorted.
        ranks: Those that have others than most ranks; empty if no majority tells.
    """

    names: list[str]
    ranks: list[int]


def groups(digests: Digests) -> dict[str, dict[str, str]]:
    """Digests by the group of ranks that have the entry: "" for all ranks, or the first rank that has a shard."""
    found: dict[str, dict[str, str]] = {}
    for name, digest in digests.items():
        _, _, first = name.partition(SHARD)
        found.setdefault(first, {})[name] = digest
    return found


def unlike_groups(sent: Sequence[Digests]) -> list[str]:
    """Groups for which ranks that sent a digest did not send the same."""
    seen: dict[str, set[str]] = {}
    for each in sent:
        for group, digest in each.items():
            seen.setdefault(group, set()).add(digest)
    return sorted(group for group, digests in seen.items() if len(digests) > 1)


def unlike_entries(ranks: Sequence[Digests], *, partial: bool = False) -> dict[str, bool]:
    """Names of entries that ranks have unlike, and whether all have them in one shape.

    Args:
        ranks: The digests of each rank.
        partial: Whether an entry may be absent from ranks, as a shard may.
    """
    found: dict[str, set[str]] = {}
    for each in ranks:
        for name, digest in each.items():
            found.setdefault(name, set()).add(digest)
    if not partial:
        for name, digests in found.items():
            if SHARD not in name and any(name not in each for each in ranks):
                digests.add("")
    return {
        name: len({digest.partition(":")[0] for digest in digests}) == 1
        for name, digests in found.items()
        if len(digests) > 1
    }


def replica_fault(
    ranks: Sequence[Digests], unlike: Collection[str], known: Collection[str], count: int
) -> ReplicaFault | None:
    """What a processor has computed wrongly; None if ranks differ by design.

    Of three replicas or more, most are equal where one is wrong. Of two, a wrong result is in few entries, as ranks
    share their gradients; ranks that train apart have nearly all entries unlike.

    Args:
        ranks: The digests of each rank.
        unlike: Names of entries that are not equal.
        known: Names of entries, among those, of which all replicas were equal at the comparison before.
        count: The number of all such entries that a rank has.
    """
    names = sorted(set(unlike) & set(known))
    wrong, largest = set[int](), 0
    for name in names:
        replicas = {rank: each[name] for rank, each in enumerate(ranks) if name in each}
        (digest, most), *_ = Counter(replicas.values()).most_common()
        largest = max(largest, len(replicas))
        if 2 * most <= len(replicas):
            wrong.clear()
            break
        wrong |= {rank for rank, other in replicas.items() if other != digest}
    if names and (wrong or (largest == 2 and 2 * len(names) <= count)):
        return ReplicaFault(names, sorted(wrong))
    return None
