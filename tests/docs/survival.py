"""Probabilities that nothing is lost with so many nodes, by scheme: exact, for losses that hit any nodes alike."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb

from fastckpt._core.policy.replicas.grouping import Group
from fastckpt.errors import ConfigError

_LARGEST = 16
"""Nodes of a part of which all subsets are counted, at most."""


def survival(holders: Mapping[str, Group], lost: int) -> float:
    """The probability that after the loss of so many nodes each of them has a holder that is left.

    Nodes that hold for each other are counted together, and the counts of such parts are multiplied as polynomials.
    """
    parts = _parts(holders)
    if any(len(part) > _LARGEST for part in parts):
        raise ConfigError(
            f"{max(map(len, parts))} nodes hold for each other in one part; at most {_LARGEST} are counted"
        )
    return _probability([_good_losses(part, holders) for part in parts], len(holders), lost)


def parity_survival(groups: Sequence[Group], lost: int) -> float:
    """The same for groups with parity: each survives the loss of one of its nodes."""
    return _probability([[1, len(group)] for group in groups], sum(map(len, groups)), lost)


def _probability(parts: Sequence[Sequence[int]], nodes: int, lost: int) -> float:
    """Return the share of good choices among all of lost nodes: by the good ones of each part, by their numbers."""
    found = [1]
    for part in parts:
        longer = [0] * (len(found) + len(part) - 1)
        for i, count in enumerate(found):
            for j, more in enumerate(part):
                longer[i + j] += count * more
        found = longer
    return found[lost] / comb(nodes, lost) if lost < len(found) else 0.0


def _good_losses(part: Group, holders: Mapping[str, Group]) -> list[int]:
    """Count, by size, the sets of a part's nodes whose loss leaves a holder to each lost node."""

    def is_good(gone: Group) -> bool:
        return all(any(holder not in gone for holder in holders[id]) for id in gone)

    return [sum(is_good(gone) for gone in combinations(part, size)) for size in range(len(part) + 1)]


def _parts(holders: Mapping[str, Group]) -> list[Group]:
    """The nodes that hold for each other, directly or through others."""
    root = {id: id for id in holders}

    def find(id: str) -> str:
        while root[id] != id:
            root[id] = root[root[id]]
            id = root[id]
        return id

    for id, held in holders.items():
        for other in held:
            root[find(other)] = find(id)
    found = dict[str, list[str]]()
    for id in holders:
        found.setdefault(find(id), []).append(id)
    return [tuple(part) for part in found.values()]
