"""Placement of copies: groups across domains, alike on all nodes, stable; and what each loss leaves."""

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.replicas.grouping import ReplicaNode, grouped
from fastckpt._core.policy.replicas.placement import Placement, place
from fastckpt._core.policy.replicas.survival import parity_survival, ring_survival, survival
from fastckpt.errors import ConfigError


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


@pytest.mark.parametrize(
    ("count", "copies", "sizes"),
    [
        (8, 1, {2: 4}),
        (9, 1, {2: 3, 3: 1}),
        (9, 2, {3: 3}),
        (11, 2, {3: 1, 4: 2}),
        (2, 2, {2: 1}),
    ],
)
def test_nodes_are_in_groups_of_one_more_than_copies(count, copies, sizes):
    found = place(nodes(count), copies)
    groups = grouped(nodes(count), found.copies + 1)
    assert {size: sum(len(group) == size for group in groups) for size in map(len, groups)} == sizes
    assert {len(held) for held in found.holders.values()} == {min(copies, count - 1)}
    held = [holder for holders in found.holders.values() for holder in holders]
    assert {held.count(id) for id in found.holders} == {found.copies}, "each holds as much as it has held for it"


def test_no_copy_and_a_single_node_have_no_holders():
    assert place(nodes(4), 0) == Placement({f"n000{i}": () for i in range(4)}, 0, ())
    assert place(nodes(1), 1) == Placement({"n0000": ()}, 0, ())
    assert place([], 1).holders == {}


def test_wrong_sizes_and_ids_that_are_not_unique_are_refused():
    for wrong in (lambda: grouped(nodes(4), 1), lambda: grouped([*nodes(2), *nodes(1)], 2)):
        with pytest.raises(ConfigError, match="give a size of 2 or more, and ids that differ"):
            wrong()


def test_every_loss_of_two_of_eight_is_survived_unless_they_are_a_pair():
    found = place(nodes(8), 1)
    results = {lost: found.survives(lost) for lost in combinations(found.holders, 2)}
    pairs = {tuple(sorted((id, holder))) for id, (holder,) in found.holders.items()}
    assert {lost for lost, good in results.items() if not good} == pairs and len(pairs) == 4
    two = place(nodes(9), 2)
    assert all(two.survives(lost) for lost in combinations(two.holders, 2))


def test_two_nodes_of_a_domain_are_no_pair_if_another_domain_has_room():
    for domains in range(2, 9):
        found = place(nodes(8, domains), 1)
        assert found.inside == (), domains
    alone = [*nodes(3, 1), ReplicaNode("other", "far")]
    found = place(alone, 1)
    assert len(found.inside) == 2 and "other" not in found.inside


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


def test_nothing_moves_when_nothing_changes():
    for count in range(2, 12):
        for copies in (1, 2):
            found = place(nodes(count, 5), copies)
            ids = {node.id: node.domain for node in nodes(count, 5)}
            assert place(again(found, ids), copies) == found, (count, copies)


def test_a_thousand_nodes_of_few_racks_are_placed_at_once():
    """In as many steps as nodes, not as pairs of them: 4,096 take seconds else."""
    found = place(nodes(4096, 3), 1)
    assert not found.inside and len(found.holders) == 4096
    assert len(place([ReplicaNode(f"n{i}", "one") for i in range(4096)], 1).inside) == 4096


@pytest.mark.parametrize(("scheme", "expected"), [("pairs", 0.933), ("ring", 0.867), ("xor", 0.533)])
def test_two_lost_of_sixteen_are_survived_as_published(scheme, expected):
    found = {
        "pairs": lambda: survival(place(nodes(16), 1).holders, 2),
        "ring": lambda: ring_survival(16, 2),
        "xor": lambda: parity_survival(grouped(nodes(16), 8), 2),
    }[scheme]()
    assert round(found, 3) == expected


def test_probabilities_are_those_of_all_losses_counted():
    for count, copies in ((7, 1), (8, 1), (9, 2), (10, 2)):
        found = place(nodes(count), copies)
        for lost in range(count + 1):
            all_of = [found.survives(gone) for gone in combinations(found.holders, lost)]
            assert survival(found.holders, lost) == pytest.approx(sum(all_of) / len(all_of))
    ring = Placement({f"{i}": (f"{(i + 1) % 9}",) for i in range(9)}, 1, ())
    for lost in range(9):
        all_of = [ring.survives(gone) for gone in combinations(ring.holders, lost)]
        assert ring_survival(9, lost) == pytest.approx(sum(all_of) / len(all_of))
        assert survival(ring.holders, lost) == pytest.approx(ring_survival(9, lost))
