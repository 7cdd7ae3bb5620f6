"""Every interleaving of jobs that share a place, in a model: correct with all rules, wrong without any one."""

import pytest

from tests.unit._core.saver.persistence.history_model import RULES, explore


@pytest.mark.parametrize(
    ("jobs", "saves", "damage"),
    [(2, 2, False), (2, 2, True), (3, 1, False), pytest.param(3, 1, True, marks=pytest.mark.campaign)],
)
def test_in_the_model_of_histories_what_was_reported_durable_is_resumed(jobs: int, saves: int, damage: bool) -> None:
    states, wrong = explore(RULES, jobs, saves, damage=damage)
    assert wrong == "" and states > 500


@pytest.mark.parametrize(
    ("rule", "jobs", "saves", "damage", "what"),
    [
        ("one makes a record", 3, 1, False, "two jobs save in one history"),
        ("look behind", 2, 1, False, "(1, 2) was reported and will not be resumed"),
        ("look after", 2, 1, False, "(1, 2) was reported and will not be resumed"),
        ("newer stays", 3, 1, False, "(2, 2) was reported and will not be resumed"),
        ("stop", 2, 1, False, "(1, 2) was reported and will not be resumed"),
        ("look again", 2, 2, True, "nothing is left"),
    ],
)
def test_the_model_of_histories_fails_without_any_one_rule(
    rule: str, jobs: int, saves: int, damage: bool, what: str
) -> None:
    assert rule in RULES
    _, wrong = explore(RULES - {rule}, jobs, saves, damage=damage)
    assert wrong.endswith(what), wrong
