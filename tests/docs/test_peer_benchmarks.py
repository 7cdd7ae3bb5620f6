"""How the benchmark of peaks of memory counts them."""

from benchmarks.suite import peak_memory
from benchmarks.suite._memory import Sample

GB = 10**9


def test_peaks_are_what_is_more_than_before_in_states_of_all_workers():
    phases = ["plain", "first save", "later saves", "persist"]
    records = [
        {"base": 1.0, "bytes": GB, "pid": 7},
        *({"phase": name, "begin": 2.0 + at, "end": 2.9 + at, "pid": 7} for at, name in enumerate(phases)),
        {"killed": 6.0},
        {"base": 8.0, "bytes": GB, "pid": 8},
        {"phase": "resume", "begin": 8.1, "end": 9.0, "pid": 8},
        {"held": GB},
    ]
    at_rest = {7: 2 * GB, 1: GB // 10}

    def sample(at: float, private: dict[int, int], shared: int = 3 * GB, cached: int = 0) -> Sample:
        return Sample(at, private, {pid: value // 2 for pid, value in private.items()}, shared, cached)

    samples = [
        sample(0.9, at_rest, 0),
        sample(2.5, at_rest | {7: 2 * GB + GB // 2}, 0),  # a step takes half a state by itself
        sample(3.5, at_rest | {7: 3 * GB}, cached=GB // 4),
        sample(4.5, at_rest | {1: GB // 5}),
        sample(5.5, at_rest | {99: GB // 2}),  # forked, and half of it is its parent's, too
        sample(7.0, {1: GB}, 4 * GB, GB),  # after the kill, before the load
        sample(7.9, {1: GB // 10, 8: GB}),
        sample(8.5, {1: GB // 10, 8: 2 * GB + GB // 4}),
    ]
    found = peak_memory.peaks(records, samples)
    assert found["workers first save"] == 0.5 and found["workers later saves"] == -0.5
    assert found["other processes later saves"] == 0.1 and found["other processes persist"] == 0.25
    assert found["page cache first save"] == 0.25 and found["shared memory first save"] == 3
    assert found["workers resume"] == 0.25
    assert (found["other processes resume"], found["shared memory resume"], found["page cache resume"]) == (0.9, 4, 1)
