"""Which ranks could load a save with files from other nodes' memory, and from where each file comes."""

import itertools
import json
from collections.abc import Mapping, Sequence

import pytest

from fastckpt._core.policy.peer_sources import NodeHolding, reachable, sources
from fastckpt._core.policy.resume import MEMORY, PEER, STORAGE, CheckpointLocation, choose

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


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([holding(0, [0, 1])], [set(), {at(1)}]),  # node 1 is fresh, and node 0 has kept its rank's file
        ([holding(0, [0])], [set(), set()]),  # nobody has the file of rank 1
        ([holding(1, [0, 1])], [set(), set()]),  # nobody knows whether its model is that of node 0
        ([holding(1, [0, 1], alike=True)], [{at(0)}, set()]),
        ([holding(0, [0, 1], wanted=False)], [set(), set()]),
        ([holding(0, [1], saved_as=1, alike=True), holding(1, [0], saved_as=0)], [{at(0)}, {at(1)}]),  # renumbered
        ([holding(0, [0]), holding(1, [1], saved_as=-1)], [set(), {at(1)}]),  # kept for others alone
        ([holding(0, [0], world_size=1)], [set(), {at(1)}]),  # rank 1 was none when it was saved
        ([], [set(), set()]),
    ],
)
def test_a_rank_reaches_what_other_nodes_hold(held: list[NodeHolding], found: list[set[CheckpointLocation]]):
    assert reachable(held, [0, 1], MAIN) == found


def test_without_a_token_of_the_save_nothing_is_reached():
    assert reachable([holding(0, [0, 1])._replace(attempt="")], [0, 1], MAIN) == [set(), set()]


def test_files_come_from_all_nodes_that_have_them_and_the_first_nodes_copy_is_asked_for_first():
    held = [holding(2, [2, 3], alike=True), holding(1, [1, 0], alike=True), holding(0, [0], saved_as=0)]
    assert sources(held, [0, 1, 2, 3], at(3)) == {
        MAIN: ["host-0:1", "host-1:1", "host-2:1"],
        "rank_3.pt": ["host-2:1"],
    }


def test_what_a_node_has_itself_is_not_fetched():
    held = [holding(0, [1], saved_as=1), holding(1, [0], saved_as=0)]
    assert sources(held, [0, 1], at(0)) == {"rank_0.pt": ["host-1:1"]}


def test_a_holding_survives_its_way():
    each = holding(0, [0, 1])
    assert NodeHolding.from_json(json.loads(json.dumps(each.to_json()))) == each


def test_in_no_case_is_a_file_chosen_that_nobody_holds_or_that_storage_would_not_have():
    """Exhaustive: three nodes of a rank each, what each holds of two saves, and what is on storage.

    Whatever is chosen: all ranks resume one save; each file of it has a source; no model is taken from a node that is
    not known to have that of the first.
    """
    kinds = [None, (True, ()), (True, (0,)), (False, (1,)), (True, (0, 1, 2)), (False, (0, 2))]
    checked = 0
    for of_new in itertools.product(kinds, repeat=3):
        for alike, stored in itertools.product((False, True), repeat=2):
            held = [_held(node, kind, 6, alike=alike) for node, kind in enumerate(of_new) if kind is not None]
            reports = [
                _has(node, of_new[node], found, stored=stored)
                for node, found in enumerate(reachable(held, [0, 1, 2], MAIN))
            ]
            choices = choose(reports, ())
            if choices is None:
                continue
            assert len({each.id for each in choices}) == 1
            for rank, choice in enumerate(choices):
                if choice.tier == PEER:
                    _check(sources(held, [0, 1, 2], choice), rank, held, of_new[rank])
                    checked += 1
            if stored:
                assert choices[0].id >= (1, 5)
    assert checked > 100


def _held(node: int, kind: tuple[bool, tuple[int, ...]], step: int, *, alike: bool) -> NodeHolding:
    saved, ranks = kind
    return holding(node, ranks, saved_as=node if saved else -1, step=step, alike=alike, world_size=3)


def _has(
    node: int, kind: tuple[bool, tuple[int, ...]] | None, found: set[CheckpointLocation], *, stored: bool
) -> set[CheckpointLocation]:
    whole = {CheckpointLocation(1, 6, MEMORY, node, "a")} if kind and kind[0] and node in kind[1] else set()
    return found | whole | ({CheckpointLocation(1, 5, STORAGE, 0, "b")} if stored else set())


def _check(
    given: Mapping[str, Sequence[str]],
    rank: int,
    held: Sequence[NodeHolding],
    mine: tuple[bool, tuple[int, ...]] | None,
) -> None:
    by_address = {each.address: each for each in held}
    needed = (
        {MAIN, *own(rank)}
        - ({MAIN} if mine and mine[0] else set())
        - (set(own(rank)) if mine and rank in mine[1] else set())
    )
    assert needed <= given.keys()
    assert all(by_address[address].is_authentic for address in given.get(MAIN, ()))
    for address in given.get(own(rank)[0], ()):
        assert rank in by_address[address].ranks
