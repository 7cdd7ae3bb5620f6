"""Margins of nodes: the number of copies of a node's own files that are left when it is lost."""

from collections.abc import Iterable
from typing import NamedTuple


class NodeMargin(NamedTuple):
    """The margin of a node.

    Attributes:
        rank: Its rank.
        copies: Copies of its large files that other nodes keep.
        size: Bytes of these files; 0 if it has none that no other node has.
    """

    rank: int
    copies: int
    size: int


def smallest(margins: Iterable[NodeMargin]) -> NodeMargin | None:
    """The node with the fewest copies left after its loss; of several that with the largest files, then lowest rank.

    None if no node has files that are lost with it.
    """
    return min(
        (each for each in margins if each.size > 0),
        key=lambda each: (each.copies, -each.size, each.rank),
        default=None,
    )
