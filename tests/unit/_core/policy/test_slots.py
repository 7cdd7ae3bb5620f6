"""Choice of a slot for a save, as tables."""

from fastckpt._core.policy.slots import Skip, SlotView, choose_slot
from tests.support.tables import for_each

EMPTY = SlotView()
BOTH = frozenset({0, 1})


def whole(step: int, pinned: str = "", history: int = 1) -> SlotView:
    return SlotView((history, step), True, pinned, BOTH, BOTH)


def filling(step: int, *done: int, pinned: str = "") -> SlotView:
    return SlotView((1, step), False, pinned, BOTH, frozenset(done))


def at(first: int, second: int) -> dict[int, tuple[int, int]]:
    """The newest step that each of two ranks has begun."""
    return {0: (1, first), 1: (1, second)}


THREE = [whole(1), whole(2), whole(3)]
TABLE = [
    ("one whole: an empty one", [whole(1), EMPTY, EMPTY], at(2, 1), [], 1),
    ("all whole: the oldest", [whole(2), whole(1), whole(3)], at(4, 3), [], 1),
    ("the oldest by history, then step", [whole(9), whole(2, history=2), whole(1, history=2)], at(1, 1), [], 0),
    ("an older history may have larger steps", [whole(1, history=2), whole(9), whole(8)], at(1, 1), [], 2),
    ("the oldest is pinned: the next one", [whole(1, "read"), whole(2), whole(3)], at(4, 3), [], 1),
    ("a pin on the newest changes nothing", [whole(1), whole(2), whole(3, "persisted")], at(4, 3), [], 0),
    ("one that all have left unfinished goes before a whole one", [whole(1), filling(2, 0), whole(3)], at(4, 4), [], 1),
    ("a save that its last writer has passed", [whole(1), filling(2, 0), EMPTY], at(3, 3), [], 2),
    ("a pinned unfinished one is left alone", [whole(3), filling(2, 0, pinned="read"), whole(1)], at(4, 4), [], 2),
    ("the oldest goes, if it is not the one that all nodes hold", THREE, at(9, 9), [(1, 2)], 0),
    ("the common one stays, though it is the oldest", THREE, at(9, 9), [(1, 1)], 1),
    ("the newest goes, if nodes know only of those before", THREE, at(9, 9), [(1, 1), (1, 2)], 2),
    ("what is common elsewhere protects nothing here", [whole(4), whole(5), whole(6)], at(9, 9), [(1, 1)], 0),
]
SKIPS = [
    (
        "two slots, one pinned",
        [whole(1, "step 1 is being persisted"), whole(2)],
        at(3, 2),
        [],
        "step 1 is being persis",
    ),
    ("the other is still filled by both", [whole(1), filling(2)], at(2, 2), [], "step 2 waits for local rank 0, 1"),
    ("rank 1 is in it now", [whole(1), filling(2, 0)], at(3, 2), [], "step 2 waits for local rank 1"),
    ("both", [whole(1), whole(0, "read by 7"), filling(2, 0)], at(3, 1), [], "read by 7; step 2 waits for local"),
    ("one is to be common next", [whole(1), whole(2)], at(9, 9), [(1, 1), (1, 2)], "step 1 is the newest that all"),
    ("newest pinned", [whole(1), whole(2), whole(3, "x")], at(9, 9), [(1, 1), (1, 2)], "step 1 is the newest that all"),
    ("no common one is here", [whole(3), whole(2, "read")], at(9, 9), [(1, 1)], "read"),
]


@for_each(*TABLE)
def test_the_oldest_unneeded_slot_is_chosen_and_none_with_a_save_that_all_nodes_hold(slots, latest, common, expected):
    assert choose_slot(slots, latest, common) == expected


@for_each(*SKIPS)
def test_a_save_without_a_free_slot_is_skipped_with_a_reason(slots, latest, common, reason):
    choice = choose_slot(slots, latest, common)
    assert isinstance(choice, Skip) and choice.reason.startswith(reason)


@for_each(
    ("rank 1 is at the save before", [whole(1), filling(2, 0)], at(3, 1), False),
    ("rank 1 has saved nothing", [filling(1, 0), filling(2, 0)], {0: (1, 3)}, True),
    ("rank 1 has saved nothing, and all is read", [whole(1, "read"), whole(2, "read")], {0: (1, 3)}, False),
)
def test_only_of_a_rank_that_has_saved_nothing_it_is_said_that_every_rank_has_to(slots, latest, is_advised):
    choice = choose_slot(slots, latest)
    assert isinstance(choice, Skip) and ("on every rank" in choice.reason) == is_advised
