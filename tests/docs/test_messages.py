"""Reports of agents to the first one: an agent of a large job sends no more of them."""

import pytest

from benchmarks.suite.growth._reporting_agents import reports


def test_two_reports_of_each_save_one_of_the_begin_and_one_of_each_comparison():
    assert reports(4, 1) == [0, 4, 4, 4]
    assert reports(4, 31) == [0, 67, 67, 67]  # as agents of a real job counted: each tenth save is compared


@pytest.mark.parametrize("count", [16, 256, 1024])
def test_an_agent_of_a_large_job_sends_no_more_reports_than_one_of_eight(count: int):
    assert max(reports(count, 12)) == max(reports(8, 12))
