"""Files that ranks of several nodes copy for their node, verify for each other, and choose for a plan."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Size
from torch.distributed.checkpoint import ChunkStorageMetadata
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fastckpt.dcp.node_copies import copies_for_nodes
from fastckpt.dcp.reader import _share


def item(name: str, offset: int, size: int) -> WriteItem:
    chunk = ChunkStorageMetadata(Size([offset]), Size([size]))
    data = TensorWriteData(chunk, TensorProperties(), Size([1000]))
    return WriteItem(MetadataIndex(name, Size([offset])), WriteItemType.SHARD, tensor_data=data)


items = st.builds(item, st.sampled_from("abcd"), st.integers(0, 2), st.just(7))
states = st.lists(st.lists(items, max_size=6, unique_by=lambda each: each.index), min_size=1, max_size=4)


@given(states, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_each_node_copies_everything_of_its_ranks_once(offered, nodes):
    offers = [SavePlan(each) for each in offered]
    nodes = nodes[: len(offers)]
    plans = dedup_save_plans(offers)
    copies = copies_for_nodes(offers, plans, nodes)
    for node in set(nodes):
        ranks = [rank for rank in range(len(offers)) if nodes[rank] == node]
        there = [each.index for rank in ranks for each in [*plans[rank].items, *copies[rank]]]
        assert set(there) == {each.index for rank in ranks for each in offered[rank]}
        assert len(there) == len(set(there))
    for rank, copied in enumerate(copies):
        assert {each.index for each in copied} <= {each.index for each in offered[rank]}
    if len(set(nodes)) == 1:
        assert not any(copies)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [2, 3]])
def test_each_file_is_checked_once_and_those_of_a_rank_by_itself(ranks):
    names = [
        ".metadata",
        *(f"__{r}_0.distcp" for r in range(4)),
        *(f"rank_{r}.pt" for r in range(4)),
        "node_0.metadata",
    ]
    files = {name: Path(name) for name in names}
    shares = [_share(files, rank, ranks) for rank in ranks]
    assert sorted(name for share in shares for name in share) == sorted(names)
    for rank, share in zip(ranks, shares, strict=True):
        assert {f"__{rank}_0.distcp", f"rank_{rank}.pt"} <= set(share)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
