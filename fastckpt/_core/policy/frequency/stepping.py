"""Steps from one pair of intervals towards another: by a factor of two at most, storage a multiple of memory."""

from fastckpt._core.policy.frequency.intervals import Fixed, Intervals, divisor, multiple
from fastckpt._core.policy.frequency.requested import RequestedIntervals

GAIN = 0.8
"""The least change of an interval that is worth it, as the ratio of the shorter to the longer one."""


def grows(now: Intervals, fixed: Fixed) -> bool:
    """Return whether a time or failures ask for intervals that are clearly longer."""
    return any(
        wanted is not None and now_ <= GAIN * wanted
        for now_, wanted in ((now.memory, fixed.memory), (now.storage, fixed.storage), (now.storage, fixed.least))
    )


def less_often(now: Intervals, wanted: Intervals, every: RequestedIntervals) -> Intervals:
    """Longer intervals, towards those wanted, none of them shorter than now."""
    memory = _between(now.memory, wanted.memory, 2 * now.memory)
    if isinstance(every.storage, int):
        return Intervals(divisor(now.storage, memory), now.storage, now.anchor)
    if isinstance(every.memory, int):
        memory = now.memory
    storage = multiple(_between(now.storage, wanted.storage, 2 * now.storage), memory)
    # Rounding up to a multiple of memory may have gone beyond the factor of two.
    if storage > 2 * now.storage:
        storage -= memory
    return Intervals(memory, storage, now.anchor)


def more_often(now: Intervals, wanted: Intervals, every: RequestedIntervals) -> Intervals:
    """Shorter intervals, towards those wanted, where that is clearly shorter."""
    memory, storage = (
        _between(-(-interval // 2), goal, interval) if goal <= GAIN * interval else interval
        for interval, goal in ((now.memory, wanted.memory), (now.storage, wanted.storage))
    )
    if isinstance(every.storage, int):
        return Intervals(now.storage // divisor(now.storage, now.storage // memory), now.storage, now.anchor)
    if isinstance(every.memory, int):
        memory = now.memory
    return Intervals(memory, multiple(max(storage, memory), memory), now.anchor)


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))
