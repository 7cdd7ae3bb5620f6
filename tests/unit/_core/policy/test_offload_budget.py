"""The least budget with which transfers hide: little on a fast disk, all on one that is too slow."""

from fastckpt._core.policy.offload_budget import least_budget
from fastckpt._core.policy.offload_plan import SavedTensor, StepProfile


def profile(sizes: list[int], rate: float) -> StepProfile:
    count = len(sizes)
    tensors = tuple(SavedTensor(size, index, 2.0 * (count - 1 - index), 1.0) for index, size in enumerate(sizes))
    return StepProfile(tensors, float(count), 2.0 * count, rate, rate)


def test_a_fast_disk_needs_what_is_on_the_way_and_a_slow_one_takes_all():
    assert least_budget(profile([10] * 100, 1e9)) == 40
    assert least_budget(profile([10] * 100, 1e-9)) >= 1000 * (1 - 1 / 64)
    assert least_budget(profile([], 1.0)) == 0
