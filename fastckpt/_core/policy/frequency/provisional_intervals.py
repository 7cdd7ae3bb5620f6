"""Intervals between saves while their costs are still being measured."""

from math import floor

from fastckpt._core.policy.frequency.intervals import FREE, LONGEST, Fixed, Intervals, whole_steps
from fastckpt._core.policy.frequency.profiling import Profile

MEMORY, STORAGE = 5.0, 30.0
"""Seconds from one save to memory to the next, and from one persist to the next, at most."""
COST = 0.2
"""Part of training time that those saves may stall; if they would stall more, they are further apart than `MEMORY`."""
COMPARED = 2
"""Steps from one save to the next, at least, until enough iterations without a save were measured to compare with."""
RECOVERY = 2.0
"""Least distance of persists, in durations of one: so iterations without a persist are left to compare with."""


def provisional(turn: float | None, profile: Profile | None, overhead: float, fixed: Fixed = FREE) -> Intervals:
    """Intervals until the final ones are chosen, counted from the last save.

    Saves are as frequent as the overhead allows, but at least every `MEMORY` and `STORAGE` seconds as long as stalls
    stay within `COST`. Where fewer than `COMPARED` steps fit into that time, each step is saved.

    Args:
        turn: Seconds from the end of one step to the end of the next, with saves, on the slowest rank; None as long as
            nothing was measured: then each step is saved.
        profile: The profile so far.
        overhead: The part of training time that checkpoints may cost.
        fixed: Intervals that the user requests; saves are no rarer, and more frequent if measuring needs it.
    """
    if turn is None:
        return Intervals(1, LONGEST)
    stall, duration, compared = 0.0, 0.0, False
    if profile is not None:
        stall, duration, compared = profile.stall, profile.duration, profile.compared
    # Stalls alone: few iterations show little of a copy's slowdown, and possible noise must not put saves off.
    within = whole_steps(stall / (overhead * turn))
    longest = min(steps_within(MEMORY, turn), fixed.memory or LONGEST)
    least = 1 if compared else COMPARED
    # The lower bound of COST comes last: it wins over MEMORY where a save stalls for long.
    memory = max(min(max(least, within), longest), whole_steps(stall / (COST * turn)))
    storage = min(steps_within(max(STORAGE, RECOVERY * duration), turn), fixed.storage or LONGEST)
    return Intervals(memory, max(1, storage // memory) * memory)


def steps_within(seconds: float, turn: float) -> int:
    """Whole steps that end within these seconds; at least 1."""
    return max(1, floor(min(seconds / turn, LONGEST)))
