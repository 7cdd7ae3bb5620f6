"""The plan of what is offloaded: a table, and properties of any plan."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.offload_plan import OffloadPlan, plan
from fastckpt._core.policy.offload_step import SavedTensor, StepProfile, room, simulate

LAYERS = 32

FAST = 1e9


def network(*sizes: int, ratios: tuple[float, ...] = (), write: float = FAST, read: float = FAST) -> StepProfile:
    """One tensor saved at the end of each second of the forward, and needed in the reverse order, every two seconds."""
    count = len(sizes)
    tensors = (
        SavedTensor(size, i + 1.0, 2.0 * (count - 1 - i), ratio)
        for i, (size, ratio) in enumerate(zip(sizes, ratios or (1.0,) * count, strict=True))
    )
    return StepProfile(tuple(tensors), count + 0.001, 2.0 * count, write, read)


def chosen(plan: OffloadPlan) -> tuple[list[int], list[int]]:
    return sorted(plan.offloaded), sorted(plan.compressed)


@pytest.mark.parametrize(
    ("profile", "budget", "offloaded", "compressed"),
    [
        (network(), 0, [], []),
        (network(8, 8, 8, 8), 32, [], []),  # all fits: nothing is written, and nothing is in flight
        (network(8, 8, 8, 8), 31, [0], []),  # 24 may stay: what is not in flight
        (network(8, 8, 8, 8, 8), 32, [0, 1], []),
        (network(8, 8, 8, 8), 0, [0, 1, 2, 3], []),
        (network(1, 1, 20, 1, 1), 16, [2], []),  # the first ones need not go when the third one must
        # Phase 1 fits with fast storage: nothing is compressed, however compressible.
        (network(8, 8, 8, 8, 8, ratios=(0.1,) * 5), 32, [0, 1], []),
    ],
)
def test_a_plan_writes_the_first_tensors_and_no_more_than_it_must(
    profile: StepProfile, budget: int, offloaded: list[int], compressed: list[int]
) -> None:
    found = plan(profile, budget)
    assert chosen(found) == (offloaded, compressed)
    assert found.predicted_wait == 0


# --- whatever the step


@st.composite
def steps(draw: st.DrawFn, most: int = 30) -> StepProfile:
    count = draw(st.integers(1, most))
    forward = draw(st.floats(0.5, 5))
    times = sorted(draw(st.lists(st.floats(0, forward), min_size=count, max_size=count)))
    slower = draw(st.floats(1, 3))
    sizes = draw(st.lists(st.integers(1, 100), min_size=count, max_size=count))
    ratios = draw(st.lists(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.1, 0.0]), min_size=count, max_size=count))
    tensors = (
        SavedTensor(size, packed, slower * (forward - packed), ratio)
        for size, packed, ratio in zip(sizes, times, ratios, strict=True)
    )
    write, read = (draw(st.floats(0.1, 3)) * sum(sizes) / forward for _ in range(2))
    codecs = (draw(st.sampled_from([1e9, 10.0, 1.0])) * sum(sizes) / forward for _ in range(2))
    return StepProfile(tuple(tensors), forward, slower * forward, write, read, *codecs)


@settings(max_examples=60, deadline=None)
@given(steps(), st.floats(0, 1.2))
def test_what_a_plan_says_of_itself_is_so(profile: StepProfile, share: float) -> None:
    sizes = [tensor.size for tensor in profile.tensors]
    budget = int(share * sum(sizes))
    found = plan(profile, budget, work=3000)
    assert found.compressed <= found.offloaded <= set(range(len(sizes)))
    assert found.resident == sum(size for index, size in enumerate(sizes) if index not in found.offloaded)
    assert found.resident <= (room(budget) if found.offloaded else budget)
    outcome = simulate(profile, budget, found.offloaded, found.compressed)
    assert found.peak == outcome.peak
    # More than the budget is in memory only for a tensor that waits to be written, or for what one node reads: waits,
    # of which a plan does not mention the shortest.
    nodes = Counter[float]()
    for tensor in profile.tensors:
        nodes[tensor.needed] += tensor.size
    assert found.peak <= max(budget, room(budget) + max(sizes)) + max(nodes.values()) * bool(outcome.wait)
    assert all(profile.pays(index) for index in found.compressed)
    assert found.predicted_wait == pytest.approx(outcome.wait, abs=1e-5 * (profile.forward + profile.backward))
    # A last layer's tensor that need not go does not.
    last = max(found.offloaded, default=None)
    assert last is None or found.predicted_wait or found.resident + sizes[last] > room(budget)


@pytest.mark.parametrize(
    ("ratios", "rate", "compresses", "waits"),
    [
        # What is chosen already is compressed first, and only as many as must be.
        ({i: 0.5 for i in range(32)}, 0.7, True, False),
        # Storage is too slow for 20: some that compress take the place of the last ones that do not.
        ({i: 0.01 for i in range(20, 32)}, 0.5, True, False),
        # Where it is a little faster, the pause between the first tensors and the last ones is enough.
        ({i: 0.01 for i in range(20, 32)}, 0.9, False, False),
        # Nothing compresses: the plan says what the step costs.
        ({}, 0.5, False, True),
    ],
)
def test_where_storage_is_too_slow_compressible_tensors_take_the_place_of_others(
    ratios: dict[int, float], rate: float, *, compresses: bool, waits: bool
) -> None:
    profile = network(*[1] * LAYERS, ratios=tuple(ratios.get(i, 1.0) for i in range(LAYERS)), write=rate)
    found = plan(profile, 16)
    assert len(found.offloaded) == 20
    assert found.compressed <= ratios.keys()
    assert bool(found.compressed) == compresses
    assert found.offloaded != found.compressed
    assert (found.predicted_wait > 0) == waits
    if not waits:
        assert simulate(profile, 16, range(20), ()).wait > 0 or found.offloaded == set(range(20))
