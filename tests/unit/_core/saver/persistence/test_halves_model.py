"""Every interleaving of three nodes in two halves, decided by the functions of the product; and wrong ones, found."""

from typing import Any

import pytest

from fastckpt._core.saver.persistence.succession import Party, members
from fastckpt._core.storage.history import Record
from tests.unit._core.saver.persistence.halves_model import PRODUCT, Rounds, explore

campaign = pytest.mark.campaign


@pytest.mark.parametrize(
    ("halves", "losses"),
    [
        (((0,), (1, 2)), 2),
        (((0, 1), (2,)), 0),
        pytest.param(((0, 1), (2,)), 2, marks=campaign),
        pytest.param(((0, 2), (1,)), 2, marks=campaign),
        pytest.param(((0,), (1, 2), (1,)), 0, marks=campaign),
        pytest.param(((0,), (1,), (2,)), 1, marks=campaign),
    ],
)
def test_of_three_nodes_in_halves_one_publishes_and_what_it_reported_is_resumed(halves: Rounds, losses: int) -> None:
    states, wrong = explore(halves, losses=losses)
    assert wrong == "" and states > 10_000


def _as_one_agent(party: Party, record: Record, *, has_died: bool) -> bool:
    return record.closed or has_died or party.launch in members(record)


def _always(*_: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("replaced", "halves", "losses", "what"),
    [
        ({"looks_behind": False}, ((0,), (1, 2)), 0, "was reported and will not be resumed"),
        ({"may_report": _always, "is_continued": _always}, ((0,), (1, 2)), 0, "was reported and will not be resumed"),
        ({"is_continued": _always}, ((0,), (1, 2)), 1, "was reported and will not be resumed"),
        ({"may_follow": _as_one_agent}, ((0,), (1, 2)), 0, "is refused for ever"),
        ({"has_opened": _always}, ((0,), (1, 2)), 0, "was reported and will not be resumed"),
    ],
)
def test_the_model_of_halves_fails_without_any_one_rule(
    replaced: dict[str, Any], halves: Rounds, losses: int, what: str
) -> None:
    _, wrong = explore(halves, PRODUCT._replace(**replaced), losses=losses)
    assert wrong.endswith(what), wrong
