"""The optimum of Daly: the paper's figures, brute force, and jobs that fail at random."""

import random
from math import exp, expm1, factorial, inf, nan

import pytest

from fastckpt._core.policy.frequency.failures import CONFIDENCE, daly, mean_time_between
from fastckpt.errors import ConfigError

MINUTE, HOUR = 60.0, 3600.0


def expected_time(interval, cost, restart, mtbf):
    """Seconds for each second of work, failures included, by the complete model of Daly 2006; infinite if too long."""
    exponent = (interval + cost) / mtbf
    return inf if exponent > 700 else mtbf * exp(restart / mtbf) * expm1(exponent) / interval


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_optimum_equals_the_figures_of_dalys_paper(hours, minutes):
    """Figures 3 to 5 of the paper: a cost of 5 minutes."""
    assert daly(5 * MINUTE, hours * HOUR) / MINUTE == pytest.approx(minutes, abs=0.5)


@pytest.mark.parametrize("mtbf", [300.0, 1000.0, 7200.0, 86400.0])
@pytest.mark.parametrize("cost", [0.1, 5.0, 60.0, 500.0])
@pytest.mark.parametrize("restart", [1.0, 600.0])
def test_the_optimum_of_daly_is_that_of_the_complete_model(cost, restart, mtbf):
    """The best of a fine grid saves less than 0.2% more."""

    def time(interval):
        return expected_time(interval, cost, restart, mtbf)

    best = min(time(cost * 1.02**i / 100) for i in range(-400, 900))
    if cost < 2 * mtbf:
        assert time(daly(cost, mtbf)) <= best * 1.002


def test_a_checkpoint_that_costs_more_than_the_time_between_failures_has_an_optimum():
    assert daly(2000, 1000) == daly(1e9, 1000) == 1000
    assert daly(1999.9, 1000) == pytest.approx(1000, rel=0.15)
    assert daly(0, 1000) == 0


def simulated(work, interval, cost, restart, failures):
    """Seconds that work takes if failures come so many seconds apart, each losing what no checkpoint holds."""
    now, done, following = 0.0, 0.0, next(failures)
    while done < work:
        part = min(interval, work - done)
        if now + part + cost <= following:
            now, done = now + part + cost, done + part
            continue
        now = following + restart
        following = now + next(failures)
    return now


def test_the_optimum_of_daly_is_near_the_best_of_randomly_failing_jobs():
    """Brute force over intervals, with the same failures for each; failures do not strike restarts."""
    rng = random.Random(11)
    cost, restart, mtbf, work = 10.0, 30.0, 1500.0, 20000.0
    seeds = [rng.random() for _ in range(60)]

    def mean_time(interval):
        total = 0.0
        for seed in seeds:
            times = random.Random(seed)
            failures = iter(lambda times=times: times.expovariate(1 / mtbf), None)
            total += simulated(work, interval, cost, restart, failures)
        return total / len(seeds)

    best = min(mean_time(20 * 1.2**i) for i in range(20))
    assert mean_time(daly(cost, mtbf)) <= best * 1.01


def test_few_failures_give_a_cautious_time_between_failures():
    assert mean_time_between(0, 1e6) is None
    assert mean_time_between(3, 0) is None
    assert mean_time_between(1, HOUR) == pytest.approx(HOUR / 3, rel=0.02)
    assert mean_time_between(100, 100 * HOUR) == pytest.approx(0.915 * HOUR, rel=0.01)
    assert mean_time_between(10**6, 10**6 * HOUR) == pytest.approx(HOUR, rel=0.002)


@pytest.mark.parametrize("failures", [1, 2, 3, 5, 10, 50, 100])
def test_the_bound_is_that_of_the_poisson_distribution(failures):
    expected = 1000.0 / mean_time_between(failures, 1000.0)
    at_most = sum(exp(-expected) * expected**k / factorial(k) for k in range(failures + 1))
    assert at_most == pytest.approx(1 - CONFIDENCE, abs=0.005)


def test_the_bound_on_failures_holds_with_its_stated_probability():
    rng = random.Random(3)
    held = seen = 0
    for _ in range(4000):
        now, failures = 0.0, 0
        while (now := now + rng.expovariate(1 / 100)) < 500:
            failures += 1
        if failures:
            seen += 1
            held += mean_time_between(failures, 500) <= 100
    assert held / seen >= CONFIDENCE - 0.02


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: daly(-1, 10), "a checkpoint costs -1 s"),
        (lambda: daly(nan, 10), "a checkpoint costs nan s"),
        (lambda: daly(1, 0), "failures are 0 s apart"),
        (lambda: daly(1, inf), "failures are inf s apart"),
        (lambda: mean_time_between(-1, 10), "-1 failures in 10 s"),
        (lambda: mean_time_between(1, nan), "1 failures in nan s"),
    ],
)
def test_impossible_costs_and_times_between_failures_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
