"""The simulation of large jobs: what it must give where that is known."""

from dataclasses import replace

import pytest

from benchmarks.scale import CASES, DAY, SCHEMES, Case, Scheme, SimulatedJob, simulate

QUIET = Case("no failures", replace(CASES[0].assumed, failures=1e-12))
WHOLE = Scheme("memory, one copy", copies=1)


def test_a_job_without_failures_loses_what_its_saves_cost_alone():
    for scheme in SCHEMES:
        job = SimulatedJob(4, scheme, QUIET, seed=1)
        found = job.run(DAY)
        assert found.failures == 0 and found.useful == pytest.approx(1 / (1 + job._overhead()))


def test_a_seed_gives_the_same_job_and_another_one_another():
    one, same, other = (SimulatedJob(64, WHOLE, CASES[0], seed).run(30 * DAY) for seed in (1, 1, 2))
    assert one == same != other


def test_a_lost_pair_goes_back_to_storage_and_other_two_do_not():
    for second, source in ((0, "storage"), (1, "copies")):
        job = SimulatedJob(4, WHOLE, replace(QUIET, assumed=replace(QUIET.assumed, hosts=1.0)), seed=1)
        holders = job._placement.holders
        first = min(holders)
        others = [*holders[first], *sorted(holders.keys() - {first, *holders[first]})]
        assert job._fail(first, DAY, DAY, DAY)[0] == "copies"
        assert job._fail(others[second], DAY + 1, 1.0, 1.0)[0] == source


def test_as_many_failures_come_as_are_assumed():
    [found] = simulate(16 * 1024, WHOLE, CASES[0], days=60, runs=1)
    expected = CASES[0].assumed.failures * 1024 * 60
    assert abs(found.failures - expected) < 4 * expected**0.5
    assert sum(found.by_source.values()) == found.failures
