"""Times of a step on a GPU are those of its stream, without what it was idle because the host waited."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import pytest
import torch

from fastckpt._core.offload.forward_pass import ForwardPass
from fastckpt._core.offload.stream_times import StreamTimes

GPU = torch.device("cuda", 0)


class At:
    """A mark to which a stream comes after so many milliseconds."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def query(self) -> bool:
        return self.milliseconds < 1000

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "At") -> float:
        return end_event.milliseconds - self.milliseconds


@dataclass(eq=False)
class Saved:
    """What a pass records of a saved storage."""

    size: int
    device: torch.device


def times(*milliseconds: float) -> StreamTimes:
    marks: Iterator[float] = iter(milliseconds)
    return StreamTimes(GPU, lambda device: At(next(marks)))


def test_a_pass_on_a_gpu_has_the_times_of_its_stream():
    forward = ForwardPass()
    saved = [Saved(100, GPU), Saved(200, GPU)]
    # packed 0, packed 1, a wait until 60, the end of the forward; then needed 1, a wait until 120, needed 0
    forward.times = times(10, 20, 60, 70, 100, 100, 120, 150, 150)
    for number, each in enumerate(saved):
        forward.add(each, number)
    forward.times.waited()
    forward.end_forward()
    forward.needs(1)
    forward.times.waited()
    forward.needs(0)
    found = forward.profile(1e9, 2e9)
    assert [each.packed for each in found.tensors] == pytest.approx([0, 0.01])
    assert [each.needed for each in found.tensors] == pytest.approx([0.03, 0])
    assert (found.forward, found.backward) == pytest.approx((0.02, 0.03))
    assert found.encode_rate == inf
    assert forward.wait == pytest.approx(0.06)
