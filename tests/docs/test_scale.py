"""The simulation of large jobs: what it must give where that is known."""

from dataclasses import replace

import pytest

from benchmarks.scale import CASES, DAY, Case, Scheme, SimulatedJob, simulate

QUIET = Case("nothing fails by itself", replace(CASES[0].assumed, failures=1e-12, hosts=1.0, links=0.0))
WHOLE = Scheme("memory, one copy", copies=1)


@pytest.mark.parametrize("scheme", [WHOLE, Scheme("parity", parity=8)], ids=["copies", "parity"])
def test_a_lost_pair_goes_back_to_storage_and_other_two_do_not(scheme: Scheme):
    for is_together, source in ((True, "storage"), (False, "copies")):
        job = SimulatedJob(2 * (scheme.parity or 2), scheme, QUIET, seed=1)
        groups = [*job._groups] if scheme.parity else [{host, *held} for host, held in job._placement.holders.items()]
        first, *_ = groups[0]
        others = {host for group in groups for host in group if (host in groups[0]) == is_together} - {first}
        assert job._fail(first, DAY, DAY, DAY)[0] == "copies"
        assert job._fail(min(others), DAY + 1, 1.0, 1.0)[0] == source


def test_as_many_failures_come_as_are_assumed():
    [found] = simulate(16 * 1024, WHOLE, CASES[0], days=60, runs=1)
    expected = CASES[0].assumed.failures * 1024 * 60
    assert abs(found.failures - expected) < 4 * expected**0.5
    assert sum(found.by_source.values()) == found.failures
