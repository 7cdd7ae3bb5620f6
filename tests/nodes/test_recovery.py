"""The measure of what a fault has cost, on logs written by hand."""

from typing import Any

from tests.nodes.recovery import Line, recovery

FAULT = 10.0


def worker(pid: int, at: float, *, world: int = 2, loaded: int, steps: int, tier: str = "memory") -> list[Line]:
    """What one worker logs that starts then, loads a step, and does some, one a second."""
    place: dict[str, Any] = {"pid": pid, "rank": 0, "world": world}
    lines = [{"what": "started", "restarts": 1, "at": at}, {"what": "loaded", "step": loaded, "tier": tier, "at": at}]
    lines += [{"what": "step", "step": loaded + number, "at": at + number} for number in range(1, steps + 1)]
    return [line | place for line in lines]


OLD = worker(1, 0.0, loaded=0, steps=9)


def test_a_job_has_not_recovered_before_each_node_trains_in_the_new_world() -> None:
    back = OLD + worker(2, 12.0, loaded=8, steps=1)
    assert recovery({0: back, 1: OLD}, [0, 1], FAULT) is None
    assert recovery({0: back, 1: OLD + worker(2, 12.0, loaded=8, steps=0)}, [0, 1], FAULT) is None
    assert recovery({0: back}, [0, 1], FAULT) is None  # a fresh host that has logged nothing
    assert recovery({0: back, 1: OLD}, [0], FAULT) is None  # which trains with one more than are expected
    assert recovery({0: back, 1: back}, [0, 1], 13.0) is None  # by workers of before the fault


def test_steps_lost_seconds_and_standstill_are_those_of_the_slowest_node() -> None:
    logs = {0: OLD + worker(2, 12.0, loaded=8, steps=2), 1: OLD + worker(2, 14.0, loaded=8, steps=2, tier="storage")}
    found = recovery(logs, [0, 1], FAULT)
    assert found is not None
    assert (found.seconds, found.step, found.lost) == (5.0, 8, 1)
    assert found.tiers == {0: "memory", 1: "storage"} and found.still == {0: 4.0, 1: 6.0}


def test_each_start_counts_and_what_a_lost_host_has_done_counts_as_lost() -> None:
    """Also starts of workers that did no step."""
    failed = OLD + worker(2, 11.0, loaded=8, steps=0) + worker(3, 12.0, loaded=8, steps=1)
    found = recovery({0: failed, 1: OLD + worker(3, 12.0, loaded=8, steps=1)}, [0, 1], FAULT)
    assert found is not None and found.starts == {0: 2, 1: 1}
    for other, lost in ((OLD[:-3], 1), (worker(1, 0.0, loaded=1, steps=9), 2)):
        found = recovery({0: OLD + worker(2, 12.0, world=1, loaded=8, steps=1), 1: other}, [0], FAULT)
        assert found is not None and found.lost == lost
