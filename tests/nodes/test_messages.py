"""Messages between the agents of a job: as many as the simulation of large jobs expects."""

from pathlib import Path

import pytest

from benchmarks.messages import counted, expected
from tests.nodes.hosts import obstacle

SAVES = 5


@pytest.mark.campaign
def test_agents_of_four_nodes_send_as_many_reports_and_copies_as_the_simulation_expects(tmp_path: Path) -> None:
    if why := obstacle():
        pytest.skip(why)
    real = counted(4, SAVES, tmp_path)
    assert [each.saves for each in real] == [SAVES] * 4
    model = expected(real)
    assert [each.count.reports for each in real] == [each.reports for each in model]
    assert [each.count.copies for each in real] == [each.copies for each in model]
    print(real, model)
