"""Memory of nodes as tables: reserves, slots, roles of files, other shapes of a job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastckpt._core.policy.memory_reserve import RESERVE, limit_for, reserve, share_of, slots_that_fit
from fastckpt._core.policy.resource_plan import (
    PAGE,
    JobShape,
    Role,
    SavedFile,
    per_node,
    reshaped,
)
from fastckpt.errors import ConfigError
from tests.support.tables import for_each

MIB = 1 << 20


@given(st.integers(1, 1 << 40), st.sampled_from([2, 3]), st.integers(0, 1 << 40))
def test_the_limit_of_a_plan_is_the_least_that_holds_its_slots(size: int, slots: int, beside: int):
    total = limit_for(size, slots, beside)
    assert total - reserve(total, share_of(slots)) >= slots * size + beside
    assert total - 1 - reserve(total - 1, share_of(slots)) < slots * size + beside


@for_each(
    (11 * MIB, 64 * MIB, 64 * MIB, 3, 2),  # docker's 64 MB: three would leave less than half
    (31 * MIB, 64 * MIB, 64 * MIB, 3, 0),
    (30 * MIB, 64 * MIB, 64 * MIB, 3, 2),
    (1000 * MIB, 3000 * MIB + RESERVE, 1 << 40, 3, 3),
    (1000 * MIB, 3000 * MIB + RESERVE - 1, 1 << 40, 3, 2),
)
def test_slots_that_fit_leave_the_reserve(size: int, free: int, total: int, most: int, slots: int):
    assert slots_that_fit(size, free, total, most) == slots


DDP = [SavedFile("model.pt", 100 * PAGE, Role.NODE), *(SavedFile(f"rank_{i}.pt", PAGE, Role.RANK, i) for i in range(4))]
FSDP = [
    SavedFile(".metadata", 40 * PAGE, Role.NODE),
    *(SavedFile(f"__{i}_0.distcp", (100 + 4 * i) * PAGE, Role.SHARD, i) for i in range(4)),
    *(SavedFile(f"rank_{i}.pt", PAGE, Role.RANK, i) for i in range(4)),
]


@for_each(
    (DDP, 4, JobShape(1, 4), [104]),
    (DDP, 4, JobShape(2, 8), [108, 108]),  # the model on each node, a file for each rank
    (FSDP, 4, JobShape(1, 4), [40 + 424 + 4]),
    (FSDP, 4, JobShape(2, 4), [80 + 4 * 56 + 4] * 2),  # 424 * (112 / 106) / 8 = 56 for the largest; a longer index
    (FSDP, 4, JobShape(1, 2), [20 + 2 * 224 + 2]),
)
def test_bytes_of_nodes_follow_the_roles_of_files(files, saved, shape, images):
    found = per_node(reshaped(files, saved, shape), shape)
    assert [node.images for node in found] == [count * PAGE for count in images]


ODD = [SavedFile("global_step1/zero_pp_rank_0.pt", PAGE, Role.OTHER, 0)]


def test_another_number_of_ranks_is_refused_for_layouts_that_are_not_known():
    with pytest.raises(ConfigError, match=r"zero_pp_rank_0.pt.*4 ranks.*save once with 8"):
        reshaped(ODD, 4, JobShape(1, 8))
