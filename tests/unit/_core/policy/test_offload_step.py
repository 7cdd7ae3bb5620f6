"""The model of a step under an offload plan: as a table, by hand."""

import pytest

from fastckpt._core.policy.offload_step import SavedTensor, StepProfile, simulate


def layers(*sizes: int, ratio: float = 1.0, **rates: float) -> StepProfile:
    """One tensor saved at the end of each second of the forward, and needed in the reverse order, every two seconds."""
    count = len(sizes)
    tensors = (SavedTensor(size, i + 1.0, 2.0 * (count - 1 - i), ratio) for i, size in enumerate(sizes))
    rates = {"write_rate": 10.0, "read_rate": 10.0} | rates
    return StepProfile(tuple(tensors), float(count), 2.0 * count, **rates)


FOUR = layers(10, 10, 10, 10)


@pytest.mark.parametrize(
    ("profile", "budget", "offloaded", "wait", "peak"),
    [
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
        (layers(10, 10, 10, 10, write_rate=5.0), 40, (0, 1, 2), 2.0, 30),
        # A read takes five seconds. The backward begins at 4; the second tensor, needed at 8, is there at 9, and the
        # first one, needed at 11 then, at 14.
        (layers(10, 10, 10, 10, read_rate=2.0), 40, (0, 1), 4.0, 30),
        # Nothing may be in flight: three tensors wait a second each for the one before. Each read begins when it
        # is needed, since only then the memory of the one before is free, and takes a second.
        (layers(10, 10, 10, 10, write_rate=5.0), 0, (0, 1, 2, 3), 6.0, 20),
    ],
)
def test_a_step_waits_for_writes_in_flight_and_for_reads_that_come_late(
    profile: StepProfile, budget: int, offloaded: tuple[int, ...], wait: float, peak: int
) -> None:
    outcome = simulate(profile, budget, offloaded, ())
    assert (outcome.wait, outcome.peak) == (pytest.approx(wait), peak)


def test_a_compressed_tensor_takes_a_part_of_the_disk_and_the_time_of_the_codec() -> None:
    slow = {"write_rate": 5.0, "read_rate": 1000.0}
    assert simulate(layers(10, 10, 10, 10, ratio=0.5, **slow), 40, (0, 1, 2), (0, 1, 2)).wait == 0
    # One second for each on the disk, and one in the codec: as long as without compression.
    with_codec = layers(10, 10, 10, 10, ratio=0.5, encode_rate=10.0, **slow)
    assert simulate(with_codec, 40, (0, 1, 2), (0, 1, 2)).wait == simulate(with_codec, 40, (0, 1, 2), ()).wait > 0
