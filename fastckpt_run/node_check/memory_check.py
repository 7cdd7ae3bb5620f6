"""Check of a node's memory: patterns that are copied have to arrive, and how fast one core copies."""

import os
import random
import time

from fastckpt._core.byte_sizes import binary
from fastckpt._core.policy.node_check import CheckResult, Verdict

_BLOCK = 1 << 20
_SHARE = 16
"""Divisor of the free memory: each of two buffers takes one such part at most."""


def check_memory(name: str, size: int, seconds: float) -> CheckResult:
    """Copy patterns between two buffers for so many seconds, and compare them.

    Args:
        name: The name of the result.
        size: Bytes of each buffer, at most.
        seconds: Duration of the copies; each pattern is copied once at least.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = max(_BLOCK, min(size, free // _SHARE) // _BLOCK * _BLOCK)
    patterns = [b"\x55" * _BLOCK, b"\xaa" * _BLOCK, random.Random(size).randbytes(_BLOCK)]
    target = bytearray(size)
    spent, copied = 0.0, 0
    for number, pattern in enumerate(patterns):
        source = bytearray(pattern) * (size // _BLOCK)
        with memoryview(source) as there, memoryview(target) as here:
            here[:] = there  # once without the clock: the first touch of a page costs more
            goal = seconds * (number + 1) / len(patterns)
            while True:
                begin = time.perf_counter()
                here[:] = there
                spent += time.perf_counter() - begin
                copied += size
                if spent >= goal:
                    break
        if (place := first_difference(source, target)) is not None:
            message = f"keeps bytes wrong: {source[place]:#04x} became {target[place]:#04x}, of {binary(size)}"
            return CheckResult(name, Verdict.PROBLEM, message, unit="GB/s")
    return CheckResult(name, Verdict.OK, "", copied / spent / 1e9, "GB/s")


def first_difference(one: bytearray, other: bytearray) -> int | None:
    """The first place at which two buffers of one length differ; None if they are equal."""
    if one == other:
        return None
    begin = next(n for n in range(0, len(one), _BLOCK) if one[n : n + _BLOCK] != other[n : n + _BLOCK])
    return next(n for n in range(begin, len(one)) if one[n] != other[n])
