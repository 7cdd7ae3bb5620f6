"""Choice of the checkpoint that a job resumes, as a table."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.resume import TIERS, CheckpointLocation, choose
from tests.support.tables import for_each


def memory(step: int, history: int = 1) -> CheckpointLocation:
    return CheckpointLocation(history, step, "memory")


def storage(step: int, history: int = 1) -> CheckpointLocation:
    return CheckpointLocation(history, step, "storage")


def node(number: int, step: int, attempt: str = "a") -> CheckpointLocation:
    return CheckpointLocation(1, step, "memory", number, attempt)


def shared(step: int, attempt: str = "a") -> CheckpointLocation:
    """On storage, as several nodes saved it."""
    return CheckpointLocation(1, step, "storage", 0, attempt)


A, B, S = node(0, 3), node(1, 3), shared(3)


@for_each(
    ("no ranks", [], set(), None),
    ("the nearest tier of the newest", [{storage(2), memory(2), memory(1)}] * 2, set(), (memory(2),) * 2),
    ("memory of one rank alone", [{memory(3), storage(1)}, {storage(1)}], set(), (storage(1),) * 2),
    ("tiers do not mix", [{memory(3)}, {storage(3)}], set(), None),
    ("a history is newer than any step", [{memory(9), memory(1, history=2)}] * 2, set(), (memory(1, history=2),) * 2),
    ("bad in memory: the same from storage", [{memory(3), storage(3)}] * 2, {memory(3)}, (storage(3),) * 2),
    ("all bad", [{memory(3), storage(3)}] * 2, {memory(3), storage(3)}, None),
    ("of unlike attempts", [{node(0, 3), node(0, 2)}, {node(1, 3, "b")}], set(), None),
    (
        "each from where it is nearest",
        [{node(0, 3), node(0, 2), shared(2)}, {shared(2)}],
        set(),
        (node(0, 2), shared(2)),
    ),
    ("bad in one memory, and on storage", [{A, S}, {B, S}], {B}, (A, S)),  # the other one's memory is good still
    ("one step of two attempts: the nearer one", [{A, shared(3, "b")}, {B, shared(3, "b")}], set(), (A, B)),
)
def test_the_newest_save_that_all_ranks_have_is_chosen(reports, excluded, expected):
    assert choose(reports, excluded) == expected


tiers = st.sampled_from(["memory", "mixed", "storage"])
candidates = st.sets(
    st.builds(
        CheckpointLocation, st.integers(0, 1), st.integers(0, 2), tiers, st.integers(0, 1), st.sampled_from(["", "a"])
    ),
    max_size=8,
)


def one_save(plan: tuple[CheckpointLocation, ...]) -> bool:
    return len({(c.id, c.attempt, "" if c.attempt else c.tier) for c in plan}) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(candidates, min_size=1, max_size=3), candidates, st.randoms())
def test_the_choice_is_the_best_save_that_every_rank_has_and_each_rank_makes_it(reports, excluded, random):
    choice = choose(reports, excluded)
    plans = [plan for plan in itertools.product(*(report - excluded for report in reports)) if one_save(plan)]
    assert (choice is None) == (not plans)
    if choice is not None:
        ours = [plan for plan in plans if plan[0].id == max(plan[0].id for plan in plans)]
        distances = {plan: sum(TIERS.index(candidate.tier) for candidate in plan) for plan in ours}
        assert choice in ours and distances[choice] == min(distances.values())
    shuffled = [dict.fromkeys(random.sample(sorted(report), len(report))) for report in reports]
    assert choose(shuffled, excluded) == choice
