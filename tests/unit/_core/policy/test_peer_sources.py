"""Which ranks could load a save with files from other nodes' memory, and from where each file comes."""

import itertools
import json
from collections.abc import Sequence

from fastckpt._core.policy.peer_sources import (
    NodeHolding,
    ParityHolding,
    holders,
    reachable,
    sources,
    unheld_ranks,
    with_rebuilt,
)
from fastckpt._core.policy.resume import PEER, STATELESS, CheckpointLocation
from tests.support.tables import for_each

MAIN = "model.pt"


def own(rank: int) -> tuple[str, ...]:
    return (f"rank_{rank}.pt",)


def holding(
    node: int, ranks: Sequence[int], *, saved_as: int | None = None, step: int = 5, **more: object
) -> NodeHolding:
    """What a node holds of a save of two ranks: its own model, if it saved, and files of these ranks."""
    saved_as = node if saved_as is None else saved_as
    values: dict[str, object] = {"world_size": 2, "alike": False, "wanted": True, "address": f"host-{node}:1"} | more
    common = (MAIN,) if saved_as >= 0 else ()
    return NodeHolding(
        node=node, history=1, step=step, attempt="a", saved_as=saved_as, common=common,
        ranks={rank: own(rank) for rank in ranks}, **values,  # type: ignore[arg-type]
    )  # fmt: skip


def at(node: int, step: int = 5) -> CheckpointLocation:
    return CheckpointLocation(1, step, PEER, node, "a")


@for_each(
    ([holding(0, [0, 1])], [set(), {at(1)}]),  # node 1 is fresh, and node 0 has kept its rank's file
    ([holding(1, [0, 1])], [set(), set()]),  # nobody knows whether its model is that of node 0
    ([holding(1, [0, 1], alike=True)], [{at(0)}, set()]),
    ([holding(0, [0, 1], wanted=False)], [set(), set()]),
    ([holding(0, [1], saved_as=1, alike=True), holding(1, [0], saved_as=0)], [{at(0)}, {at(1)}]),  # renumbered
    ([holding(0, [0]), holding(1, [1], saved_as=-1)], [set(), {at(1)}]),  # kept for others alone
    ([holding(0, [0], world_size=1)], [set(), {at(1)}]),  # rank 1 was none when it was saved
)
def test_a_rank_reaches_what_other_nodes_hold(held: list[NodeHolding], found: list[set[CheckpointLocation]]):
    assert reachable(held, [0, 1], MAIN) == found


def test_files_come_from_all_nodes_that_have_them_and_the_first_nodes_copy_is_asked_for_first():
    held = [holding(2, [2, 3], alike=True), holding(1, [1, 0], alike=True), holding(0, [0], saved_as=0)]
    assert sources(held, [0, 1, 2, 3], at(3)) == {
        MAIN: ["host-0:1", "host-1:1", "host-2:1"],
        "rank_3.pt": ["host-2:1"],
    }


@for_each(
    ([holding(0, [0])], [set(), {at(1)._replace(tier=STATELESS)}]),
    ([holding(0, [0, 1])], [set(), {at(1)}]),
    ([holding(0, [0]), holding(1, [])], [set(), {at(1)._replace(tier=STATELESS)}]),
    ([holding(1, [1])], [set(), set()]),  # the first node's model is nowhere
)
def test_a_rank_may_go_on_without_a_file_that_nobody_has(held: list[NodeHolding], found: list[set[CheckpointLocation]]):
    assert reachable(held, [0, 1], MAIN, allow_lost=True) == found
    nearer = [{each for each in of if each.tier == PEER} for of in found]
    assert reachable(held, [0, 1], MAIN) == nearer


def test_a_rank_asks_for_what_it_lacks_and_for_no_model_that_may_not_be_the_first_nodes():
    held = [holding(0, [0]), holding(1, [0, 1]), holding(2, [1, 2])]
    nodes = [0, 1, 2]
    assert sources(held, nodes, at(1)) == {}
    assert sources(held[1:], nodes, at(0)) == {"rank_0.pt": ["host-1:1"]}
    assert sources([held[0], held[2]], nodes, at(1)) == {MAIN: ["host-0:1"], "rank_1.pt": ["host-2:1"]}
    assert sources([held[0]._replace(common=()), *held[1:]], nodes, at(0)) == {}
    assert sources([held[1], holding(2, [])], nodes[1:], at(2)) == {"rank_1.pt": ["host-1:1"]}


# --- a state that is divided among ranks


def shard(rank: int, node: int) -> tuple[str, ...]:
    """The files of a rank that was alone on a node: its shards, and the node's index."""
    return f"__{rank}_0.distcp", f"node_{node}.metadata"


def divided(
    node: int, ranks: Sequence[int], *, saved: int, world_size: int = 3, alike: bool = True, **more: object
) -> NodeHolding:
    files = {rank: shard(rank, rank) for rank in ranks}
    return holding(node, (), saved_as=saved, world_size=world_size, alike=alike, **more)._replace(ranks=files)


@for_each(2, 3)
def test_a_divided_state_is_reached_exactly_if_some_node_has_each_shard_that_is_needed(count: int):
    """Exhaustive: three ranks have saved; nodes of now hold their own part or none, and copies of any others."""
    nodes, saved = range(count), range(3)
    needs = [shard(rank, rank) for rank in nodes]
    reached = 0
    parts = [*itertools.chain.from_iterable(itertools.combinations(saved, size) for size in range(4))]
    for of in itertools.product(parts, repeat=count):
        held = [divided(n, of[n], saved=n if n in of[n] else -1) for n in nodes]
        found = reachable(held, [*nodes], MAIN, needs, may_redivide=True)
        there = set[int]().union(*(each.ranks.keys() for each in held))
        is_possible = there >= {*saved} and any(each.saved_as >= 0 for each in held)
        for rank in nodes:
            is_here = count == 3 and rank in of[rank] and MAIN in held[rank].common
            assert bool(found[rank]) == (is_possible and not is_here), (of, rank)
            if not found[rank]:
                continue
            (at_peer,) = found[rank]
            given = sources(held, [*nodes], at_peer, needs)
            assert (MAIN in given) == (MAIN not in held[rank].common)
            lacking = {*needs[rank]} - {name for names in held[rank].ranks.values() for name in names}
            if count == 3:
                assert given.keys() - {MAIN} == lacking
            reached += 1
    assert reached >= 30


def test_shards_that_another_division_needs_come_from_any_node_that_holds_them():
    held = [divided(0, (0, 1), saved=0), divided(1, (2, 0), saved=2)]
    save = held[0].save
    assert holders(held, save, 0, ["__1_0.distcp", "__2_0.distcp"]) == {"__2_0.distcp": ["host-1:1"]}
    assert holders(held, save, 2, ["__0_0.distcp"]) == {"__0_0.distcp": ["host-0:1", "host-1:1"]}
    assert holders(held, save, 2, ["__3_0.distcp"]) == {}


def test_a_file_of_another_rank_that_a_rank_needs_comes_from_where_that_is():
    """As the model of a DeepSpeed engine without ZeRO 3, which one rank saves."""
    held = [holding(0, (0,), saved_as=0, alike=True), holding(1, (1,), saved_as=1, alike=True)]
    model = ("mp_rank_00_model_states.pt",)
    held[0] = held[0]._replace(ranks={0: own(0) + model})
    needs = [own(0) + model, own(1) + model]
    assert reachable(held, [0, 1], MAIN, needs) == [set(), {at(1)}]
    assert sources(held, [0, 1], at(1), needs) == {model[0]: ["host-0:1"]}
    assert reachable(held, [0, 1, 2], MAIN, [*needs, needs[1]]) == [set()] * 3  # it cannot divide itself otherwise


GROUP = ("a", "b", "c", "d")


def with_parity(node: int, **more: object) -> NodeHolding:
    """What a node of a group of four holds of its save of four ranks: its rank's file, and parity with all others'."""
    ranks = {id: {number: own(number)} for number, id in enumerate(GROUP) if number != node}
    parity = ParityHolding(GROUP, GROUP[node], ranks)
    return holding(node, [node], world_size=4, alike=True, parity=(parity,))._replace(**more)  # type: ignore[arg-type]


OF_ANOTHER_GROUP = ParityHolding(GROUP[1:], "c", {})
SHARDS = [own(rank) for rank in range(4)]


@for_each(0, 2)
def test_a_lost_nodes_files_are_reached_if_all_others_of_its_group_have_parity(lost: int):
    left = [with_parity(node) for node in range(4) if node != lost]
    found = with_rebuilt([NodeHolding.from_json(json.loads(json.dumps(each.to_json()))) for each in left])
    assert found[:3] == left
    assert reachable(found, range(4), MAIN, SHARDS) == [{at(node)} if node == lost else set() for node in range(4)]
    assert sources(found, range(4), at(lost))[own(lost)[0]] == [each.address for each in left]
    assert not any(reachable(left, range(4), MAIN, SHARDS))


@for_each(
    [with_parity(0), with_parity(1)],  # two are lost
    [with_parity(0), with_parity(1), with_parity(2, parity=())],  # parity is not whole
    [with_parity(0), with_parity(1), with_parity(2, saved_as=-1)],  # its slot has another save
    [with_parity(0), with_parity(1), with_parity(2, step=4)],
    [with_parity(0), with_parity(1), with_parity(2, parity=(OF_ANOTHER_GROUP,))],
)
def test_nothing_is_reached_from_parity_that_is_not_of_all_others_of_a_group(left: list[NodeHolding]):
    assert with_rebuilt(left) == left
    assert at(3) not in reachable(left, range(4), MAIN, SHARDS)[3]


def test_a_file_of_a_node_that_is_there_comes_from_it_first_and_else_from_parity():
    held = [with_parity(node) for node in range(4)]
    wanted = {own(2)[0]}
    assert holders(with_rebuilt(held), (1, 5, "a"), 0, wanted) == {own(2)[0]: [held[2].address, *others(held, 2)]}
    assert holders(with_rebuilt([*held[:2], held[3]]), (1, 5, "a"), 0, wanted) == {own(2)[0]: others(held, 2)}


def others(held: Sequence[NodeHolding], node: int) -> list[str]:
    return [each.address for each in held if each.node != node]


def test_what_an_earlier_group_has_counts_while_parity_of_the_later_one_is_not_whole():
    """The fourth node was replaced, and its successor is lost before all have parity of the new group."""
    later = ParityHolding((*GROUP[:3], "e"), "a", {"e": {3: own(3)}})
    left = [with_parity(0), with_parity(1), with_parity(2)]
    left[0] = left[0]._replace(parity=(later, *left[0].parity))
    found = with_rebuilt([NodeHolding.from_json(json.loads(json.dumps(each.to_json()))) for each in left])
    assert found[:3] == left
    assert sources(found, range(4), at(3))[own(3)[0]] == [each.address for each in left]


def test_ranks_whose_files_no_memory_gives_back_are_named_once_all_that_are_left_have_the_save():
    left = [with_parity(0), with_parity(1)]
    assert unheld_ranks(with_rebuilt(left)) == {(1, 5, "a"): [2, 3]}
    assert unheld_ranks(with_rebuilt([*left, with_parity(2)])) == {}
    later = with_parity(0, step=6, parity=())
    assert unheld_ranks([later, *left]) == {(1, 5, "a"): [2, 3]}  # the other one has not saved step 6 yet
    assert unheld_ranks([later, *left, with_parity(1, step=6, parity=())])[1, 6, "a"] == [2, 3]
