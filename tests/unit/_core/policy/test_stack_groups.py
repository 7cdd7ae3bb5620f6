"""Groups of ranks by their stacks: tables and properties, without processes."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.hangs import Witness
from fastckpt._core.policy.stack_groups import (
    MOST,
    STATES,
    CaughtRank,
    Frame,
    StackGroup,
    StackGroups,
    grouped,
    place_of,
    ranges,
)

TORCH = "/usr/lib/python3.11/site-packages/torch"
REDUCE = [
    Frame(f"{TORCH}/distributed/distributed_c10d.py", "2810", "all_reduce"),
    Frame("/job/train.py", "40", "train"),
    Frame("/job/train.py", "90", "<module>"),
]
TAKE = [Frame("/job/data.py", "88", "take"), Frame("/job/train.py", "36", "train")]
READ = [Frame("/usr/lib/python3.11/threading.py", "355", "wait"), Frame("/job/data.py", "12", "read")]


def caught(rank: int, frames: list[Frame], host: str = "", **witness) -> CaughtRank:
    """A rank that waits if its stack is in torch.distributed; eight ranks a host."""
    waits = bool(frames) and "/torch/" in frames[0].file
    witness = {"steps": 41, "waits": waits, **witness}
    names = tuple(frame.name for frame in frames)
    return CaughtRank(Witness(rank, **witness), host or f"h{rank // 8}", names, place_of(frames), waits)


def waiting(count: int, *, but: tuple[int, ...] = ()) -> list[CaughtRank]:
    return [caught(rank, REDUCE) for rank in range(count) if rank not in but]


TABLE = {
    "one of 64 is elsewhere": (
        [*waiting(64, but=(37,)), caught(37, TAKE)],
        (),
        "1 of 64 ranks, rank 37 on host h4, is in take (data.py:88); 63 wait in all_reduce (train.py:40)",
    ),
    "two odd ranks with different stacks": (
        [*waiting(16, but=(3, 9)), caught(3, TAKE), caught(9, READ)],
        (),
        "1 of 16 ranks, rank 3 on host h0, is in take (data.py:88); rank 9 on host h1 is in wait (data.py:12); "
        "14 wait in all_reduce (train.py:40)",
    ),
    "of two odd ones, the one with fewer steps": (
        [*waiting(16, but=(3, 9)), caught(3, TAKE), caught(9, TAKE, steps=40)],
        (),
        "1 of 16 ranks, rank 9 on host h1, is in take (data.py:88); rank 3 on host h0 is in take (data.py:88); "
        "14 wait in all_reduce (train.py:40)",
    ),
    "all equal": (
        waiting(1000),
        (),
        "1000 of 1000 ranks, ranks 0-999 on hosts h0, h1, h2, h3 and 121 more, wait in all_reduce (train.py:40); "
        "which of them is to blame is not known",
    ),
    "all in one place, but one is a step behind": (
        [*waiting(8, but=(5,)), caught(5, REDUCE, steps=40)],
        (),
        "1 of 8 ranks, rank 5 on host h0, waits in all_reduce (train.py:40); 7 wait in all_reduce (train.py:40); "
        "rank 5 has done fewer steps than the others",
    ),
    "one waits in another collective": (
        [*waiting(8, but=(5,)), caught(5, [replace(REDUCE[0], function="barrier"), *TAKE[1:]])],
        (),
        "1 of 8 ranks, rank 5 on host h0, waits in barrier (train.py:36); 7 wait in all_reduce (train.py:40); "
        "rank 5 waits elsewhere than most others",
    ),
    "one is stopped, and has no stack": (
        [*waiting(4, but=(2,)), caught(2, [], state="T")],
        (),
        "1 of 4 ranks, rank 2 on host h0, is stopped (SIGSTOP); ranks 0-1,3 on host h0 wait in all_reduce "
        "(train.py:40)",
    ),
    "one is stopped, another elsewhere": (
        [*waiting(4, but=(1, 2)), caught(1, TAKE), caught(2, [], state="T")],
        (),
        "1 of 4 ranks, rank 2 on host h0, is stopped (SIGSTOP); rank 1 on host h0 is in take (data.py:88); "
        "ranks 0,3 on host h0 wait in all_reduce (train.py:40)",
    ),
    "one gives no stack": (
        [*waiting(10, but=(2,)), caught(2, [])],
        (),
        "1 of 10 ranks, rank 2 on host h0, gives no stack; 9 wait in all_reduce (train.py:40)",
    ),
    "one gives no stack, but another is elsewhere": (
        [*waiting(10, but=(2, 3)), caught(2, []), caught(3, TAKE)],
        (),
        "1 of 10 ranks, rank 3 on host h0, is in take (data.py:88); rank 2 on host h0 gives no stack; "
        "8 wait in all_reduce (train.py:40)",
    ),
    "nobody gives a stack": (
        [caught(0, []), caught(1, [])],
        (),
        "2 of 2 ranks, ranks 0-1 on host h0, give no stack; which of them is to blame is not known",
    ),
    "one has exited": (
        [*waiting(8, but=(5,)), caught(5, [], has_left=True, state="")],
        (),
        "1 of 8 ranks, rank 5 on host h0, has exited; 7 wait in all_reduce (train.py:40)",
    ),
    "one has left": (
        [*waiting(8, but=(5,)), caught(5, [], has_left=True)],
        (),
        "1 of 8 ranks, rank 5 on host h0, has closed its checkpointer; 7 wait in all_reduce (train.py:40)",
    ),
    "one goes on, elsewhere": (
        [*waiting(8, but=(5,)), caught(5, TAKE, goes_on=True)],
        (),
        "7 of 8 ranks, ranks 0-4,6-7 on host h0, wait in all_reduce (train.py:40); rank 5 on host h0 goes on; "
        "which of them is to blame is not known",
    ),
    "all spin, as over NCCL, and one is elsewhere": (
        [
            *[replace(each, witness=replace(each.witness, waits=False)) for each in waiting(8, but=(7,))],
            caught(7, TAKE),
        ],
        (),
        "1 of 8 ranks, rank 7 on host h0, is in take (data.py:88); 7 compute in all_reduce (train.py:40)",
    ),
    "an agent gives no answer": (
        [caught(rank, REDUCE) for rank in range(8)],
        ("h1",),
        "8 of 16 ranks, ranks 0-7 on host h0, wait in all_reduce (train.py:40); the agent on host h1 gave no answer "
        "(ranks 8-15); what the others wait for may be there",
    ),
    "an agent gives no answer, but another's rank is elsewhere": (
        [*waiting(8, but=(5,)), caught(5, TAKE)],
        ("h1",),
        "1 of 16 ranks, rank 5 on host h0, is in take (data.py:88); 7 wait in all_reduce (train.py:40); the agent on "
        "host h1 gave no answer (ranks 8-15)",
    ),
}


@pytest.mark.parametrize(("ranks", "unheard", "line"), TABLE.values(), ids=TABLE)
def test_the_line_names_the_odd_ranks_first(ranks, unheard, line):
    random.Random(3).shuffle(ranks)
    world = len(ranks) + 8 * len(unheard)
    assert grouped(ranks, world, unheard).line.startswith(line)


def test_of_two_ranks_that_compute_none_is_the_odd_one_but_one_outside_of_a_collective_is_first():
    spins = replace(caught(0, REDUCE), witness=Witness(0, 41))
    found = grouped([spins, caught(1, TAKE)], 2)
    assert [group.state for group in found.groups] == ["elsewhere", "computes"] and not found.odd


def test_stacks_are_equal_whatever_directories_addresses_and_other_threads_differ():
    ours = caught(0, [Frame("/node-0/job/data.py", "88", "take"), Frame("<string>", "1", "f_0x7f00")])
    theirs = caught(1, [Frame("/node-1/job/data.py", "88", "take"), Frame("<string>", "1", "f_0x8fAA")])
    [group] = grouped([ours, theirs], 2).groups
    assert group.ranks == (0, 1) and group.place == "take (data.py:88)"
    assert len(grouped([ours, caught(1, [Frame("/job/data.py", "89", "take")])], 2).groups) == 2


def test_a_place_is_in_the_script_and_names_what_it_called():
    assert place_of(TAKE) == "take (data.py:88)"
    assert place_of(REDUCE) == "all_reduce (train.py:40)"
    assert place_of(READ) == "wait (data.py:12)"
    assert place_of(REDUCE[:1]) == "all_reduce (distributed_c10d.py:2810)"
    assert place_of([]) == ""


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([*range(37), *range(38, 64)], "0-36,38-63"),
        (range(0, 1000, 2), "0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30 and 484 more"),
    ],
)
def test_ranges_of_ranks_are_short(ranks, text):
    assert ranges(ranks) == text


@pytest.mark.parametrize("count", [1000, 20_000])
def test_a_thousand_ranks_of_a_thousand_places_make_a_short_line(count):
    apart = [caught(rank, [Frame("data.py", str(rank), "take")]) for rank in range(count)]
    found = grouped(apart, count)
    assert len(found.groups) == MOST and found.more == (count - MOST, count - MOST)
    assert len(found.line) < 600 and f"{count - 4} are in {count - 4} other places" in found.line
    assert len(json.dumps(found.to_json())) < 20_000


# --- properties

frames = st.sampled_from([REDUCE, TAKE, READ, [], REDUCE[:1], TAKE[1:]])
ranks = st.builds(
    lambda frames, **fields: (frames, fields),
    frames,
    state=st.sampled_from(["S", "S", "R", "T", "D", ""]),
    steps=st.integers(0, 3),
    goes_on=st.booleans(),
    has_left=st.booleans(),
    waits=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ranks, max_size=40), st.lists(st.sampled_from(["x", "y"]), unique=True), st.randoms())
def test_each_rank_is_in_one_group_the_odd_first_and_the_order_of_answers_changes_nothing(told, unheard, chance):
    everybody = [caught(rank, frames, **fields) for rank, (frames, fields) in enumerate(told)]
    found = grouped(everybody, len(told), unheard)
    shuffled = [*everybody]
    chance.shuffle(shuffled)
    assert grouped(shuffled, len(told), unheard) == found
    members = [rank for group in found.groups for rank in group.ranks]
    assert len(members) == len(set(members)) == len(told) - found.more[1]
    assert [group.is_odd for group in found.groups] == sorted((group.is_odd for group in found.groups), reverse=True)
    assert set(group.state for group in found.groups) <= STATES.keys()
    for group in found.groups:
        assert list(group.ranks) == sorted(group.ranks)
        assert {everybody[rank].frames for rank in group.ranks} == {group.stack}
        assert {everybody[rank].state for rank in group.ranks} == {group.state}
    assert "\n" not in found.line and len(found.line) < 3000
    assert StackGroups.of_json(json.loads(json.dumps(found.to_json()))) == found
    certain = {rank for rank, each in enumerate(everybody) if each.witness.state == "T"}
    assert not certain or certain == {rank for group in found.odd for rank in group.ranks}


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*"ab"]), inner, max_size=3),
    ),
    st.sampled_from(["groups", "reason", "world", "unheard", "missing", "more"]),
)
def test_what_another_agent_sends_is_groups_or_an_error_that_is_expected(value, field):
    body = grouped(waiting(3), 3).to_json() | {field: value}
    try:
        found = StackGroups.of_json(body)
    except (LookupError, TypeError, ValueError):
        return
    assert isinstance(found.line, str) and all(isinstance(group, StackGroup) for group in found.groups)
