"""Copies of items that ranks of other nodes write, so that each node has all that its own ranks need."""

from collections import Counter
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from fastckpt.dcp.flattening import in_order


def copies_for_nodes(
    offers: Sequence[SavePlan], plans: Sequence[SavePlan], nodes: Sequence[int]
) -> list[list[WriteItem]]:
    """Items that each rank copies, in the order of its file: those of a node's ranks that none of them writes.

    Each item is copied by the rank of the node that has the least to write so far.

    Args:
        offers: The items of each rank.
        plans: The items that each rank writes.
        nodes: On which node each rank is.
    """
    there: dict[int, set[MetadataIndex]] = {node: set() for node in nodes}
    load: Counter[int] = Counter()
    for rank, plan in enumerate(plans):
        # 1. items that each node writes anyway, and each rank's bytes   2. items that a node's ranks have and
        # none of them writes   3. each of these to the rank with the least to write
        there[nodes[rank]] |= {item.index for item in plan.items}
        load[rank] = sum(map(_size, plan.items))
    wanted: dict[tuple[int, MetadataIndex], list[int]] = {}
    found: dict[tuple[int, MetadataIndex], WriteItem] = {}
    for rank, offer in enumerate(offers):
        node = nodes[rank]
        for item in offer.items:
            if item.index not in there[node]:
                wanted.setdefault((node, item.index), []).append(rank)
                found[node, item.index] = item
    copies: list[list[WriteItem]] = [[] for _ in offers]
    for key, ranks in wanted.items():
        rank = min(ranks, key=lambda each: load[each])
        copies[rank].append(found[key])
        load[rank] += _size(found[key])
    return [in_order(items) for items in copies]


def _size(item: WriteItem) -> int:
    return item.tensor_storage_size() or 1
