"""Every interleaving of three nodes in two halves, decided by the functions of the product."""

import pytest

from tests.unit._core.saver.persistence.halves_model import Rounds, explore

campaign = pytest.mark.campaign


@pytest.mark.parametrize(
    ("halves", "losses"),
    [
        (((0,), (1, 2)), 0),
        pytest.param(((0,), (1, 2)), 2, marks=campaign),
        pytest.param(((0, 1), (2,)), 2, marks=campaign),
        pytest.param(((0, 2), (1,)), 2, marks=campaign),
        pytest.param(((0,), (1, 2), (1,)), 0, marks=campaign),
        pytest.param(((0,), (1,), (2,)), 1, marks=campaign),
    ],
)
def test_of_three_nodes_in_halves_one_publishes_and_what_it_reported_is_resumed(halves: Rounds, losses: int) -> None:
    states, wrong = explore(halves, losses)
    assert wrong == "" and states > 10_000
