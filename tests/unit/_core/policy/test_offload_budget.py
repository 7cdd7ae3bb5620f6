"""The least budget with which transfers hide: little on a fast disk, all on one that is too slow."""

from hypothesis import given
from hypothesis import strategies as st

from fastckpt._core.policy.offload_budget import TOLERATED, least_budget
from fastckpt._core.policy.offload_plan import SavedTensor, StepProfile, plan


def profile(sizes: list[int], rate: float) -> StepProfile:
    count = len(sizes)
    tensors = tuple(SavedTensor(size, index, 2.0 * (count - 1 - index), 1.0) for index, size in enumerate(sizes))
    return StepProfile(tensors, float(count), 2.0 * count, rate, rate)


def test_a_fast_disk_needs_what_is_on_the_way_and_a_slow_one_takes_all():
    assert least_budget(profile([10] * 100, 1e9)) == 40
    assert least_budget(profile([10] * 100, 1e-9)) >= 1000 * (1 - 1 / 64)
    assert least_budget(profile([], 1.0)) == 0


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.floats(0.1, 1000))
def test_with_that_budget_waits_are_tolerable(sizes, rate):
    step = profile(sizes, rate)
    budget = least_budget(step)
    assert budget <= sum(sizes)
    assert plan(step, budget).predicted_wait <= TOLERATED * (step.forward + step.backward) or budget == sum(sizes)
