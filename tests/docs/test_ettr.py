"""The shares of a job's time that the benchmark ettr makes of its lives."""

import pytest

from benchmarks.suite.ettr import STEP, Life, shares


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
