"""The plan of what is offloaded, the model of a step under it, and the least budget: tables, properties of any plan."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt._core.policy.offload_budget import least_budget
from fastckpt._core.policy.offload_plan import OffloadPlan, plan
from fastckpt._core.policy.offload_step import SavedTensor, StepProfile, room, simulate
from tests.support.tables import for_each

LAYERS = 32

FAST = 1e9


def network(*sizes: int, ratios: Sequence[float] | float = 1.0, **rates: float) -> StepProfile:
    """One tensor saved at the end of each second of the forward, and needed in the reverse order, every two seconds."""
    count = len(sizes)
    each = [ratios] * count if isinstance(ratios, float) else ratios
    tensors = (SavedTensor(size, i + 1.0, 2.0 * (count - 1 - i), each[i]) for i, size in enumerate(sizes))
    rates = {"write_rate": FAST, "read_rate": FAST} | rates
    return StepProfile(tuple(tensors), float(count), 2.0 * count, **rates)


def chosen(plan: OffloadPlan) -> tuple[list[int], list[int]]:
    return sorted(plan.offloaded), sorted(plan.compressed)


@for_each(
    (network(), 0, [], []),
    (network(8, 8, 8, 8), 32, [], []),  # all fits: nothing is written, and nothing is in flight
    (network(8, 8, 8, 8), 31, [0], []),  # 24 may stay: what is not in flight
    (network(8, 8, 8, 8, 8), 32, [0, 1], []),
    (network(8, 8, 8, 8), 0, [0, 1, 2, 3], []),
    (network(1, 1, 20, 1, 1), 16, [2], []),  # the first ones need not go when the third one must
    # Phase 1 fits with fast storage: nothing is compressed, however compressible.
    (network(8, 8, 8, 8, 8, ratios=0.1), 32, [0, 1], []),
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


@settings(max_examples=40)
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


@for_each(
    # What is chosen already is compressed first, and only as many as must be.
    ({i: 0.5 for i in range(32)}, 0.7, True, False),
    # Storage is too slow for 20: some that compress take the place of the last ones that do not.
    ({i: 0.01 for i in range(20, 32)}, 0.5, True, False),
    # Where it is a little faster, the pause between the first tensors and the last ones is enough.
    ({i: 0.01 for i in range(20, 32)}, 0.9, False, False),
    # Nothing compresses: the plan says what the step costs.
    ({}, 0.5, False, True),
)
def test_where_storage_is_too_slow_compressible_tensors_take_the_place_of_others(
    ratios: dict[int, float], rate: float, compresses: bool, waits: bool
) -> None:
    profile = network(*[1] * LAYERS, ratios=[ratios.get(i, 1.0) for i in range(LAYERS)], write_rate=rate)
    found = plan(profile, 16)
    assert len(found.offloaded) == 20
    assert found.compressed <= ratios.keys()
    assert bool(found.compressed) == compresses
    assert found.offloaded != found.compressed
    assert (found.predicted_wait > 0) == waits
    if not waits:
        assert simulate(profile, 16, range(20), ()).wait > 0 or found.offloaded == set(range(20))


# --- a step, by hand


def slow(*sizes: int, **options: float) -> StepProfile:
    """Storage that takes a second for ten bytes."""
    return network(*sizes, **{"write_rate": 10.0, "read_rate": 10.0} | options)


FOUR = slow(10, 10, 10, 10)


@for_each(
    (FOUR, 40, (), 0.0, 40),
    # Written within the second after it is saved, read in the six seconds before it is needed.
    (FOUR, 40, (0,), 0.0, 40),
    # The last one is handed back from memory: it is needed when the backward begins.
    (FOUR, 40, (3,), 0.0, 40),
    # Both are written by the end of the forward, which holds two. Both are read before the second node begins
    # at 6, which frees the last tensor.
    (FOUR, 40, (0, 1), 0.0, 40),
    # Each write takes two seconds. The limit in flight is 10, so the second tensor waits one second for the first
    # one, and the third, which is one second later then, one for the second one.
    (slow(10, 10, 10, 10, write_rate=5.0), 40, (0, 1, 2), 2.0, 30),
    # A read takes five seconds. The backward begins at 4; the second tensor, needed at 8, is there at 9, and the
    # first one, needed at 11 then, at 14.
    (slow(10, 10, 10, 10, read_rate=2.0), 40, (0, 1), 4.0, 30),
    # Nothing may be in flight: three tensors wait a second each for the one before. Each read begins when it
    # is needed, since only then the memory of the one before is free, and takes a second.
    (slow(10, 10, 10, 10, write_rate=5.0), 0, (0, 1, 2, 3), 6.0, 20),
)
def test_a_step_waits_for_writes_in_flight_and_for_reads_that_come_late(
    profile: StepProfile, budget: int, offloaded: tuple[int, ...], wait: float, peak: int
) -> None:
    outcome = simulate(profile, budget, offloaded, ())
    assert (outcome.wait, outcome.peak) == (pytest.approx(wait), peak)


def test_a_compressed_tensor_takes_a_part_of_the_disk_and_the_time_of_the_codec() -> None:
    rates = {"ratios": 0.5, "write_rate": 5.0, "read_rate": 1000.0}
    assert simulate(slow(10, 10, 10, 10, **rates), 40, (0, 1, 2), (0, 1, 2)).wait == 0
    # One second for each on the disk, and one in the codec: as long as without compression.
    with_codec = slow(10, 10, 10, 10, encode_rate=10.0, **rates)
    assert simulate(with_codec, 40, (0, 1, 2), (0, 1, 2)).wait == simulate(with_codec, 40, (0, 1, 2), ()).wait > 0


def test_a_fast_disk_needs_what_is_on_the_way_and_a_slow_one_takes_all() -> None:
    assert least_budget(network(*[10] * 100)) == 40
    assert least_budget(network(*[10] * 100, write_rate=1e-9, read_rate=1e-9)) >= 1000 * (1 - 1 / 64)
    assert least_budget(network()) == 0
