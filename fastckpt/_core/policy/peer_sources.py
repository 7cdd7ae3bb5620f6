"""Ranks that could load a save from the memory of other nodes, and the nodes that have each file."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fastckpt._core.policy.resume import PEER, STATELESS, CheckpointLocation

FIRST = 0
"""The node whose copy of files that all nodes have alike is the one that storage would have."""


REBUILT = 1 << 30
"""Number in place of a node's rank for files that no node has, but some can rebuild together."""


class ParityHolding(NamedTuple):
    """Parity that a node holds of a save.

    Attributes:
        group: The ids of the agents that made it, in order.
        own: The id of this node's agent.
        ranks: By each other agent of the group, the files of its ranks, by rank, as far as its record names them.
    """

    group: tuple[str, ...]
    own: str
    ranks: Mapping[str, Mapping[int, tuple[str, ...]]]


class NodeHolding(NamedTuple):
    """Part of a save that one node holds.

    Attributes:
        node: Its rank now.
        attempt: The token that the ranks of all nodes shared when they saved.
        saved_as: Its rank when its own ranks saved it; -1 if it keeps files of others only.
        world_size: The number of ranks that saved.
        alike: Whether the common files were equal on all nodes when they were last compared.
        wanted: True if it may be resumed, as far as this node knows.
        address: Address of its files; of files to be rebuilt, the addresses of all that take part, with commas.
        common: The files that it holds, of those that each node saves.
        ranks: The files of ranks that it holds, its own and others', by rank.
        parity: Files that it can help to rebuild: of several groups, if its node was in one after the other.
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
    parity: tuple[ParityHolding, ...] = ()

    @property
    def save(self) -> tuple[int, int, str]:
        """Key of the save; two holdings with the same key are of the same save."""
        return self.history, self.step, self.attempt

    @property
    def addresses(self) -> list[str]:
        """Addresses of its files; there are several if it has to be rebuilt."""
        return self.address.split(",")

    @property
    def is_authentic(self) -> bool:
        """True if its common files are those that storage would have."""
        return self.saved_as == FIRST or (self.saved_as > FIRST and self.alike)

    def to_json(self) -> list[Any]:
        """Return a part of a message."""
        *fields, common, ranks, parity = self
        groups = [[list(of.group), of.own, {id: _with_text(files) for id, files in of.ranks.items()}] for of in parity]
        return [*fields, list(common), _with_text(ranks), groups]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "NodeHolding":
        """The holding in a message."""
        *fields, common, ranks, groups = values
        parity = [
            ParityHolding(tuple(group), own, {id: _with_numbers(files) for id, files in of.items()})
            for group, own, of in groups
        ]
        return cls._make([*fields, tuple(common), _with_numbers(ranks), tuple(parity)])


def _with_text(ranks: Mapping[int, Sequence[str]]) -> dict[str, list[str]]:
    return {str(rank): list(names) for rank, names in ranks.items()}


def _with_numbers(ranks: Mapping[str, Sequence[str]]) -> dict[int, tuple[str, ...]]:
    return {int(rank): tuple(names) for rank, names in ranks.items()}


def with_rebuilt(holdings: Sequence[NodeHolding]) -> list[NodeHolding]:
    """The holdings, and one of files that can be rebuilt for each node if all others of its group have parity.

    That node may be lost, or be there: its files may be damaged, and are known to be so only when they are read.
    """
    groups: dict[tuple[tuple[int, int, str], tuple[str, ...]], dict[str, tuple[NodeHolding, ParityHolding]]] = {}
    for each in holdings:
        for parity in each.parity if each.saved_as >= 0 else ():
            groups.setdefault((each.save, parity.group), {})[parity.own] = each, parity
    found = [*holdings]
    for (_, group), members in groups.items():
        for lost in group:
            others = [members[id] for id in group if id in members and id != lost]
            if len(others) < len(group) - 1:
                continue
            ranks = {rank: files for _, parity in others for rank, files in parity.ranks.get(lost, {}).items()}
            addresses = ",".join(each.address for each, _ in others)
            one = others[0][0]._replace(node=REBUILT, saved_as=-1, common=(), parity=())
            found.append(one._replace(address=addresses, ranks=ranks))
    return found


def reachable(
    holdings: Collection[NodeHolding],
    nodes: Sequence[int],
    main: str,
    shards: Sequence[Collection[str]] = (),
    *,
    may_redivide: bool = False,
    allow_lost: bool = False,
) -> list[set[CheckpointLocation]]:
    """The saves that each rank could load with files from other nodes, if it could not without.

    Args:
        holdings: Holdings of all nodes.
        nodes: The node of each rank.
        main: The file that each rank needs, besides its own.
        shards: For a state that is divided among ranks, the files that each rank needs of a save of as many ranks.
        may_redivide: True if ranks can go on from a save of another number of them. Each may need the files of all
            then, so some node has to hold each.
        allow_lost: True if a rank may load a save without its own file, if nobody holds that.
    """
    by_save: dict[tuple[int, int, str], list[NodeHolding]] = {}
    for holding in holdings:
        if holding.attempt:
            by_save.setdefault(holding.save, []).append(holding)
    found: list[set[CheckpointLocation]] = [set() for _ in nodes]
    for (history, step, attempt), held in by_save.items():
        if not any(each.wanted for each in held):
            continue
        if shards:
            tiers = _divided(held, nodes, main, shards, may_redivide=may_redivide)
        else:
            tiers = _alike(held, nodes, main, allow_lost=allow_lost)
        for rank, (node, tier) in enumerate(zip(nodes, tiers, strict=True)):
            if tier:
                found[rank].add(CheckpointLocation(history, step, tier, node, attempt))
    return found


def _alike(held: Collection[NodeHolding], nodes: Sequence[int], main: str, *, allow_lost: bool) -> list[str]:
    """The tier of each rank for a state that all ranks have alike but for small files; empty for none, or memory."""
    states = {rank for each in held for rank in each.ranks}
    count = max(each.world_size for each in held)
    has_main = _have_main(held, main)
    local, tiers = {each.node: each for each in held}, []
    for rank, node in enumerate(nodes):
        mine, is_new = local.get(node), rank >= count
        here = mine is not None and main in mine.common
        is_whole = here and (is_new or (mine is not None and rank in mine.ranks))
        tier = PEER if is_new or rank in states else STATELESS
        tiers.append(tier if (has_main or here) and not is_whole and (tier == PEER or allow_lost) else "")
    return tiers


def _divided(
    held: Collection[NodeHolding],
    nodes: Sequence[int],
    main: str,
    shards: Sequence[Collection[str]],
    *,
    may_redivide: bool,
) -> list[str]:
    """The tier of each rank for a state that is divided among ranks; empty for none, or memory."""
    here = defaultdict[int, set[str]](set)
    for each in held:
        here[each.node] |= _files(each)
    anywhere, saved = set[str]().union(*here.values()), range(max(each.world_size for each in held))
    if len(saved) == len(nodes):
        is_possible = all(anywhere.issuperset(names) for names in shards)
        is_here = [here[node].issuperset(names) for node, names in zip(nodes, shards, strict=True)]
    else:
        is_possible = may_redivide and {rank for each in held for rank in each.ranks}.issuperset(saved)
        is_here = [False] * len(nodes)
    has_main, with_main = _have_main(held, main), {each.node for each in held if main in each.common}
    return [
        PEER if is_possible and (has_main or node in with_main) and not (is_mine and node in with_main) else ""
        for node, is_mine in zip(nodes, is_here, strict=True)
    ]


def _files(holding: NodeHolding) -> set[str]:
    """The files of ranks that a node holds."""
    return {name for names in holding.ranks.values() for name in names}


def _have_main(held: Collection[NodeHolding], main: str) -> bool:
    """Return whether any node can give others the file that each rank needs."""
    return any(each.is_authentic and main in each.common for each in held)


def sources(
    holdings: Collection[NodeHolding],
    nodes: Sequence[int],
    location: CheckpointLocation,
    shards: Sequence[Collection[str]] = (),
) -> dict[str, list[str]]:
    """The addresses of other nodes that hold each file that the ranks of one node lack of a save.

    Args:
        holdings: Holdings of all nodes.
        nodes: The node of each rank.
        location: The save, and the node.
        shards: As in `reachable`. Of a save of another number of ranks it is known only later which files a rank needs:
            see `holders`.
    """
    held = _held(holdings, location.save)
    mine = next((each for each in held if each.node == location.node), None)
    own = [rank for rank, node in enumerate(nodes) if node == location.node and not (mine and rank in mine.ranks)]
    needed = {name for node, names in zip(nodes, shards, strict=False) if node == location.node for name in names}
    if shards and any(each.world_size != len(nodes) for each in held):
        own, needed = [], set()
    lacking, found = needed - (_files(mine) if mine else set()), dict[str, list[str]]()
    for each in held:
        if each is mine:
            continue
        names = set(each.common) if each.is_authentic and not (mine and mine.common) else set()
        names |= {name for rank in own for name in each.ranks.get(rank, ())} | (_files(each) & lacking)
        for name in names:
            found.setdefault(name, []).extend(each.addresses)
    return found


def holders(
    holdings: Collection[NodeHolding], save: tuple[int, int, str], node: int, names: Collection[str]
) -> dict[str, list[str]]:
    """The addresses of other nodes than this one that hold files of ranks of these names; without those nobody has."""
    found: dict[str, list[str]] = {}
    for each in _held(holdings, save):
        for name in _files(each).intersection(names):
            if each.node != node:
                found.setdefault(name, []).extend(each.addresses)
    return found


def unheld_ranks(holdings: Collection[NodeHolding]) -> dict[tuple[int, int, str], list[int]]:
    """The ranks without files on any node, even rebuilt ones, of each save in the memory of all nodes that have any."""
    nodes, found = {each.node for each in holdings if each.saved_as >= 0}, dict[tuple[int, int, str], list[int]]()
    for save in {each.save for each in holdings}:
        held = _held(holdings, save)
        missing = {*range(max(each.world_size for each in held))}.difference(*(each.ranks for each in held))
        if missing and {each.node for each in held if each.saved_as >= 0} == nodes:
            found[save] = sorted(missing)
    return found


def _held(holdings: Collection[NodeHolding], save: tuple[int, int, str]) -> list[NodeHolding]:
    """Return the holdings of a save, the first node's first.

    Its common files come first, too: they are those that storage would have.
    """
    held = (each for each in holdings if each.save == save)
    return sorted(held, key=lambda each: (each.saved_as != FIRST, each.node))
