"""Intervals between saves of a job of which it is still measured what saves cost."""

from dataclasses import dataclass
from math import floor

from fastckpt._core.policy.frequency.intervals import FREE, LONGEST, Fixed, Intervals, whole_steps

MEMORY, STORAGE = 5.0, 30.0
"""Seconds from one save to memory to the next, and from one persist to the next, at most."""
COST = 0.2
"""Part of training time that those saves may stall: if they would take more, they are further apart than `MEMORY`."""
COMPARED = 2
"""Steps from one save to the next, at least, until enough iterations without a save were measured to compare with."""
RECOVERY = 2.0
"""Times the duration of a persist until the next one begins: iterations without one are left to compare with."""


@dataclass(frozen=True)
class ProvisionalIntervals:
    """What all ranks have measured so far.

    Attributes:
        turn: Seconds from the end of one step to the end of the next, with saves, on the slowest rank.
        stall: Seconds that training waits for a save; 0 as long as that is not known.
        duration: Seconds until a persisted save is durable; 0 as long as that is not known.
        compared: Whether enough iterations without a save were measured.
    """

    turn: float
    stall: float = 0.0
    duration: float = 0.0
    compared: bool = False


def provisional(pace: ProvisionalIntervals | None, overhead: float, fixed: Fixed = FREE) -> Intervals:
    """How often to save until the intervals are chosen, counted from the last save.

    As often as stalls stay within the overhead, but at least every `MEMORY` and `STORAGE` seconds, as far as the stalls
    stay within `COST`. Where less than `COMPARED` steps fit into that time, each step is saved.

    Args:
        pace: None as long as nothing was measured: then each step is saved.
        overhead: The part of training time that checkpoints may cost.
        fixed: What the user wants; saves are no rarer than that, and more frequent as far as measuring needs it.
    """
    if pace is None:
        return Intervals(1, LONGEST)
    within = whole_steps(pace.stall / (overhead * pace.turn))
    longest = min(steps_within(MEMORY, pace.turn), fixed.memory or LONGEST)
    least = 1 if pace.compared else COMPARED
    memory = max(min(max(least, within), longest), whole_steps(pace.stall / (COST * pace.turn)))
    storage = min(steps_within(max(STORAGE, RECOVERY * pace.duration), pace.turn), fixed.storage or LONGEST)
    return Intervals(memory, max(1, storage // memory) * memory)


def steps_within(seconds: float, turn: float) -> int:
    """Whole steps that end within these seconds; at least 1."""
    return max(1, floor(min(seconds / turn, LONGEST)))
