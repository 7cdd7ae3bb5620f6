"""The simulation of messages: what an agent sends does not grow with the job."""

import pytest

from benchmarks.messages import keepers, pairs, reports, signs, watch


def test_two_reports_of_each_save_one_of_the_begin_and_one_of_each_comparison():
    assert reports(4, 1) == [0, 4, 4, 4]
    assert reports(4, 31) == [0, 67, 67, 67]  # as agents of a real job counted: each tenth save is compared


@pytest.mark.parametrize("count", [16, 256, 1024])
def test_an_agent_of_a_large_job_sends_no_more_than_one_of_eight(count: int):
    assert max(reports(count, 12)) == max(reports(8, 12))
    assert max(keepers(pairs(count))) == max(keepers(pairs(8))) == 3


def test_messages_that_come_by_time_follow_from_the_intervals():
    assert watch(2, 60) == 121 + 2 and watch(4, 60) == watch(1024, 60) == 3 * 121 + 6
    assert signs(60) == pytest.approx(60 / 0.4 * 2.25)
