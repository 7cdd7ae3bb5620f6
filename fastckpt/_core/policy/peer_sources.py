"""Ranks that could load a save from the memory of other nodes, and the nodes that have each file."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fastckpt._core.policy.resume import PEER, STATELESS, CheckpointLocation

FIRST = 0
"""The node whose copy of what all nodes have alike is the one that storage would have."""


class NodeHolding(NamedTuple):
    """What one node holds of a save.

    Attributes:
        node: Its rank now.
        attempt: The token that the ranks of all nodes shared when they saved.
        saved_as: Its rank when its own ranks saved it; -1 if it keeps files of others only.
        world_size: The number of ranks that saved.
        alike: Whether the common files were equal on all nodes when they were last compared.
        wanted: Whether it may be resumed, as far as this node knows.
        address: Where the others find its files.
        common: The files that it holds of those that each node has of its own.
        ranks: The files of ranks that it holds, its own and others', by rank.
    """

    node: int
    history: int
    step: int
    attempt: str
    saved_as: int
    world_size: int
    alike: bool
    wanted: bool
    address: str
    common: tuple[str, ...]
    ranks: Mapping[int, tuple[str, ...]]

    @property
    def save(self) -> tuple[int, int, str]:
        """What makes two holdings ones of the same save."""
        return self.history, self.step, self.attempt

    @property
    def is_authentic(self) -> bool:
        """Whether its common files are those that storage would have."""
        return self.saved_as == FIRST or (self.saved_as > FIRST and self.alike)

    def to_json(self) -> list[Any]:
        """As a part of a message."""
        *fields, common, ranks = self
        return [*fields, list(common), {str(rank): list(names) for rank, names in ranks.items()}]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "NodeHolding":
        """The holding in a message."""
        *fields, common, ranks = values
        return cls._make([*fields, tuple(common), {int(rank): tuple(names) for rank, names in ranks.items()}])


def reachable(
    holdings: Collection[NodeHolding], nodes: Sequence[int], main: str, *, allow_lost: bool = False
) -> list[set[CheckpointLocation]]:
    """The saves that each rank could load with files from other nodes, if it could not without.

    Args:
        holdings: What all nodes hold.
        nodes: The node of each rank.
        main: The file that each rank needs, beside its own.
        allow_lost: Whether a rank whose own file nobody holds may load a save without it.
    """
    by_save: dict[tuple[int, int, str], list[NodeHolding]] = {}
    for holding in holdings:
        if holding.attempt:
            by_save.setdefault(holding.save, []).append(holding)
    found: list[set[CheckpointLocation]] = [set() for _ in nodes]
    for (history, step, attempt), held in by_save.items():
        if not any(each.wanted for each in held):
            continue
        states = {rank for each in held for rank in each.ranks}
        count = max(each.world_size for each in held)
        has_main = any(each.is_authentic and main in each.common for each in held)
        local = {each.node: each for each in held}
        for rank, node in enumerate(nodes):
            mine, is_new = local.get(node), rank >= count
            here = mine is not None and main in mine.common
            is_whole = here and (is_new or (mine is not None and rank in mine.ranks))
            tier = PEER if is_new or rank in states else STATELESS
            if (has_main or here) and not is_whole and (tier == PEER or allow_lost):
                found[rank].add(CheckpointLocation(history, step, tier, node, attempt))
    return found


def sources(
    holdings: Collection[NodeHolding], nodes: Sequence[int], location: CheckpointLocation
) -> dict[str, list[str]]:
    """The addresses of other nodes that hold each file that the ranks of one node lack of a save.

    Args:
        holdings: What all nodes hold.
        nodes: The node of each rank.
        location: The save, and the node.
    """
    # The first node's first: what it has alike with others is what storage would have.
    held = sorted(
        (each for each in holdings if each.save == location.save), key=lambda each: (each.saved_as != FIRST, each.node)
    )
    mine = next((each for each in held if each.node == location.node), None)
    found: dict[str, list[str]] = {}
    for each in held:
        if each is mine:
            continue
        names = set(each.common) if each.is_authentic and not (mine and mine.common) else set()
        for rank, node in enumerate(nodes):
            if node == location.node and not (mine and rank in mine.ranks):
                names |= set(each.ranks.get(rank, ()))
        for name in names:
            found.setdefault(name, []).append(each.address)
    return found
