"""Placement of copies: groups across domains, alike on all nodes, stable; and which losses are survived."""

import random
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.replicas.grouping import ReplicaNode, grouped
from fastckpt._core.policy.replicas.placement import Placement, place
from tests.support.tables import for_each


def nodes(count: int, domains: int = 0) -> list[ReplicaNode]:
    return [ReplicaNode(f"n{i:04}", f"d{i % domains if domains else i}") for i in range(count)]


def again(found: Placement, ids: dict[str, str]) -> list[ReplicaNode]:
    """The nodes of the next round, with their domains, by what each has learned in the last one."""
    partners = {id: {*found.holders.get(id, ())} for id in ids}
    for id, held in found.holders.items():
        for other in held:
            partners.get(other, set()).add(id)
    return [ReplicaNode(id, domain, tuple(sorted(partners[id]))) for id, domain in ids.items()]


def moved(before: Placement, after: Placement) -> int:
    """Copies that have to be made, of nodes that were there before."""
    return sum(len(set(after.holders[id]) - set(before.holders[id])) for id in after.holders if id in before.holders)


@for_each(
    (8, 1, {2: 4}),
    (9, 1, {2: 3, 3: 1}),
    (9, 2, {3: 3}),
    (11, 2, {3: 1, 4: 2}),
    (2, 2, {2: 1}),
)
def test_nodes_are_in_groups_of_one_more_than_copies(count, copies, sizes):
    found = place(nodes(count), copies)
    groups = grouped(nodes(count), found.copies + 1)
    assert {size: sum(len(group) == size for group in groups) for size in map(len, groups)} == sizes
    assert {len(held) for held in found.holders.values()} == {min(copies, count - 1)}
    held = [holder for holders in found.holders.values() for holder in holders]
    assert {held.count(id) for id in found.holders} == {found.copies}, "each holds as much as it has held for it"


def test_every_loss_of_two_of_eight_is_survived_unless_they_are_a_pair():
    found = place(nodes(8), 1)
    results = {lost: found.survives(lost) for lost in combinations(found.holders, 2)}
    pairs = {tuple(sorted((id, holder))) for id, (holder,) in found.holders.items()}
    assert {lost for lost, good in results.items() if not good} == pairs and len(pairs) == 4
    two = place(nodes(9), 2)
    assert all(two.survives(lost) for lost in combinations(two.holders, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=24), st.integers(1, 2), st.randoms(use_true_random=False))
def test_all_nodes_find_the_same_and_none_is_inside_a_domain_without_need(domains, copies, rng: random.Random):
    given_ = [ReplicaNode(f"n{i}", f"d{domain}") for i, domain in enumerate(domains)]
    found = place(given_, copies)
    shuffled = given_.copy()
    rng.shuffle(shuffled)
    assert place(shuffled, copies) == found
    largest = max(domains.count(domain) for domain in domains)
    groups = grouped(given_, found.copies + 1)
    if largest <= len(groups) and len(domains) % (found.copies + 1) == 0:
        assert not found.inside


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 40), st.integers(1, 2), st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=12))
def test_a_change_moves_few_copies(count, copies, changes):
    """One node that goes or comes changes its own group and at most one or two others, however many there are."""
    ids = {node.id: node.domain for node in nodes(count)}
    found = place([ReplicaNode(id, domain) for id, domain in ids.items()], copies)
    for number, (comes, choice) in enumerate(changes):
        if comes or len(ids) <= 2 * copies + 2:
            ids[f"x{number}"] = f"x{number}"
        else:
            del ids[sorted(ids)[choice % len(ids)]]
        after = place(again(found, ids), copies)
        assert moved(found, after) <= 4 * (copies + 1) * copies
        found = after
