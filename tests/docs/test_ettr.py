"""The shares of a job's time that the benchmark ettr makes of its lives."""

import pytest

from benchmarks.suite.ettr import STEP, Life, instants, shares


def steps(begin: float, count: int) -> list[float]:
    return [begin + STEP * (n + 1) for n in range(count)]


def test_each_second_has_one_cause():
    """The first life is killed 0.25 s into its ninth step, of eight steps one is lost; the next resumes after 2 s."""
    lives = [Life(0.0, 0, steps(0.0, 8), 4.25), Life(6.25, 7, steps(6.25, 7), None)]
    found = shares(lives, 10.0)
    assert found["ettr"] == pytest.approx((7 + 7) * STEP / (6.25 + 7 * STEP))
    assert found["restart"] == pytest.approx(2.0)
    assert found["unfinished"] == pytest.approx(0.25)
    assert found["repeated"] == pytest.approx(STEP)
    assert found["saves"] == pytest.approx(0.0)


def test_of_a_job_that_is_down_at_the_end_what_it_resumes_later_was_of_use():
    lives = [Life(0.0, 0, steps(0.0, 8), 9.0), Life(11.0, 6, steps(11.0, 3), None)]
    found = shares(lives, 10.0)
    assert found["ettr"] == pytest.approx(6 * STEP / 10.0)
    assert found["restart"] == pytest.approx(1.0)


def test_instants_are_as_many_as_the_mean_says_and_the_same_in_a_round():
    assert [len(instants(mean, 60.0, 0)) for mean in (60, 20, 10)] == [1, 3, 6]
    assert instants(20, 60.0, 1) == instants(20, 60.0, 1) != instants(20, 60.0, 2)
