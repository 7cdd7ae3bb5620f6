"""Placement of copies: which nodes hold the files of which."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fastckpt._core.policy.replicas.grouping import Group, ReplicaNode, grouped


@dataclass(frozen=True)
class Placement:
    """Assignment of copies to nodes.

    Attributes:
        holders: The nodes that hold the files of each node, by its id.
        copies: Number of copies of each; fewer than asked for if there are too few nodes.
        inside: Nodes that are lost together with all of their holders: there is no other domain.
    """

    holders: Mapping[str, Group]
    copies: int
    inside: Group

    def partners(self, id: str) -> Group:
        """The nodes of its group: they hold files of this one, or it holds files of them."""
        return tuple(sorted({*self.holders[id], *(other for other, held in self.holders.items() if id in held)}))

    def survives(self, lost: Collection[str]) -> bool:
        """Return whether each of the lost nodes has a holder that is left."""
        gone = set(lost)
        return all(any(holder not in gone for holder in self.holders[id]) for id in gone)


def place(nodes: Sequence[ReplicaNode], copies: int) -> Placement:
    """Place copies of each node's files on other nodes: in pairs for one copy, in groups of three for two.

    The nodes of a group that is larger than that hold in a cycle. Each node holds as many copies as it has itself.

    Args:
        nodes: In any order; each agent finds the same.
        copies: Of each node's files; 0 for none.
    """
    copies = max(0, min(copies, len(nodes) - 1))
    if not copies:
        return Placement({node.id: () for node in nodes}, 0, ())
    holders = dict[str, Group]()
    for group in grouped(nodes, copies + 1):
        for number, id in enumerate(group):
            holders[id] = tuple(group[(number + offset) % len(group)] for offset in range(1, copies + 1))
    domains = {node.id: node.domain for node in nodes}
    inside = (id for id, held in holders.items() if all(domains[each] == domains[id] for each in held))
    return Placement(holders, copies, tuple(sorted(inside)))
