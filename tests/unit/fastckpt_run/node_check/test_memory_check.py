"""Patterns in memory: what arrives changed is found at its place."""

import pytest

from fastckpt._core.policy.node_check import Verdict
from fastckpt_run.node_check.memory_check import check_memory, first_difference


@pytest.mark.parametrize("place", [None, 0, (1 << 20) - 1, 1 << 20, (3 << 20) - 1])
def test_the_first_difference_of_two_buffers_is_found(place):
    one, other = bytearray(b"\x55" * (3 << 20)), bytearray(b"\x55" * (3 << 20))
    if place is not None:
        other[place] ^= 1
    assert first_difference(one, other) == place


def test_this_memory_passes_and_has_a_rate():
    result = check_memory("memory", 4 << 20, 0.0)
    assert (result.verdict, result.unit) == (Verdict.OK, "GB/s") and result.value > 0
