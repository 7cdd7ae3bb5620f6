"""Decides, by the digests of all ranks, which entries are unlike, and whether a processor has computed them wrongly.

A weight that was equal on all its replicas, and is not any more, is silent data corruption (Dixit et al., "Silent Data
Corruptions at Scale", 2021, sections 3 and 5). Only a majority of three replicas or more shows which one is wrong.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

SHARD = " (shard of rank "
"""Text between an entry's name and the first rank that has a replica of the shard, in the name of a shard."""
OPTIONS = "param_groups"
"""Part of the name of each option of an optimizer."""
Digests = Mapping[str, str]
"""Type and shape of each entry, by name, and after a colon a digest of its bytes."""


Lacking = Literal["unlike", "less", "fine"]
"""Kind of an entry that a rank lacks: unlike; the rank has given less than the first one; or it need not have it."""


class ReplicaFault(NamedTuple):
    """Replicas that were equal, and are not any more.

    Attributes:
        names: Of the entries, sorted.
        ranks: The ranks that differ from most ranks; empty if there is no majority.
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


def unlike_entries(
    ranks: Sequence[Digests], lacking: Lacking = "unlike", whole: Collection[str] = ()
) -> dict[str, bool]:
    """Names of entries that ranks have unlike, and whether all have them in one shape.

    Args:
        ranks: The digests of each rank.
        lacking: Verdict on an entry that a rank lacks and that is no shard.
        whole: Objects that one rank saves whole: an entry is unlike if the first rank, or one with some, lacks it.
    """
    found: dict[str, set[str]] = {}
    for each in ranks:
        for name, digest in each.items():
            found.setdefault(name, set()).add(digest)
    objects = [{head_of(name, whole) for name in each} for each in ranks]
    for name, digests in found.items():
        head = head_of(name, whole)
        those = [each for i, each in enumerate(ranks) if head is None or not i or head in objects[i]]
        if SHARD not in name and not _has_enough(name, those, lacking if head is None else "unlike"):
            digests.add("")
    return {
        name: len({digest.partition(":")[0] for digest in digests}) == 1
        for name, digests in found.items()
        if len(digests) > 1
    }


def _has_enough(name: str, ranks: Sequence[Digests], lacking: Lacking) -> bool:
    if lacking == "fine":
        return True
    if lacking == "less":  # an empty place, such as None, stands for all that the first rank has there
        return name in ranks[0] or any(other.startswith(f"{name}.") for other in ranks[0])
    return all(name in each for each in ranks)


def whole_objects(unlike: Mapping[str, bool], objects: Collection[str]) -> dict[str, bool]:
    """Return the unlike entries by whole objects: no object is put together from two ranks."""
    found: dict[str, bool] = {}
    for name, has_shape in unlike.items():
        found[head_of(name, objects) or name] = has_shape
    return {name: has_shape or name in objects for name, has_shape in found.items()}


def head_of(name: str, objects: Collection[str]) -> str | None:
    """The object, of these, in which an entry is; None if it is in none."""
    parts = name.split(".") if objects else []
    heads = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((head for head in heads if head in objects), None)


def replica_fault(
    ranks: Sequence[Digests], unlike: Collection[str], known: Collection[str], count: int
) -> ReplicaFault | None:
    """Return the entries that a processor has computed wrongly; None if ranks differ by design.

    Of three replicas or more, most are equal where one is wrong. Of two, a wrong result is in few entries, as ranks
    share their gradients; ranks that train apart have nearly all unlike that change. Unlike options of an optimizer,
    such as its rate, are the script's, and explain all else.

    Args:
        ranks: The digests of each rank.
        unlike: Names of entries that are not equal.
        known: Names of entries, among those, of which all replicas were equal at the comparison before.
        count: The number of all such entries that have changed on a rank since then.
    """
    if any(OPTIONS in name for name in unlike):
        return None
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
