"""Which checkpoint a job resumes, as a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastckpt.policy.resume import Candidate, choose


def memory(step: int, history: int = 1) -> Candidate:
    return Candidate(history, step, "memory")


def storage(step: int, history: int = 1) -> Candidate:
    return Candidate(history, step, "storage")


TABLE = [
    ("no ranks", [], set(), None),
    ("nothing anywhere", [set(), set()], set(), None),
    ("the newest", [{memory(1), memory(2)}] * 2, set(), memory(2)),
    ("the nearest tier of the newest", [{storage(2), memory(2), memory(1)}] * 2, set(), memory(2)),
    ("newer on storage than in memory", [{storage(3), memory(2)}] * 2, set(), storage(3)),
    ("the newest that all have", [{memory(3), memory(2)}, {memory(2), memory(1)}], set(), memory(2)),
    ("memory of one rank alone does not count", [{memory(3), storage(1)}, {storage(1)}], set(), storage(1)),
    ("nothing in common", [{memory(3)}, {memory(2)}], set(), None),
    ("tiers do not mix", [{memory(3)}, {storage(3)}], set(), None),
    ("a history is newer than any step", [{memory(9), memory(1, history=2)}] * 2, set(), memory(1, history=2)),
    ("bad in memory: the same from storage", [{memory(3), storage(3)}] * 2, {memory(3)}, storage(3)),
    ("bad on storage: the one before", [{storage(3), storage(2)}] * 2, {storage(3)}, storage(2)),
    ("all bad", [{memory(3), storage(3)}] * 2, {memory(3), storage(3)}, None),
]


@pytest.mark.parametrize(("reports", "excluded", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_chooses(reports, excluded, expected):
    assert choose(reports, excluded) == expected


candidates = st.sets(
    st.builds(Candidate, st.integers(0, 2), st.integers(0, 4), st.sampled_from(["memory", "storage"])), max_size=8
)


@given(st.lists(candidates, min_size=1, max_size=4), candidates)
def test_is_in_every_report_and_none_better_is(reports, excluded):
    choice = choose(reports, excluded)
    usable = set.intersection(*reports) - excluded
    assert (choice is None) == (not usable)
    if choice is not None:
        assert choice in usable
        assert all(
            other.id < choice.id or (other.id == choice.id and choice.tier == "memory") for other in usable - {choice}
        )
    assert choice == choose(reports[::-1], excluded)
