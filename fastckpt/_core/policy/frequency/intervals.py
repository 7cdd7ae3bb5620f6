"""Intervals of snapshots and persists: pure functions of the costs of an iteration and a checkpoint."""

from dataclasses import dataclass
from math import ceil, floor, inf, isqrt, sqrt
from typing import Self

from fastckpt.errors import ConfigError

LONGEST = 10**9
"""Steps of the longest interval: in effect, never."""
SHORTEST = 1e-9
"""Seconds below which the time of an iteration is implausible."""
ROOM = 1.25
"""Factor by which intervals between persists are longer than a persist. So it ends in time even if it takes a little
longer, and some iterations run without one, to compare with."""
UNSAVED = 0.5
"""Seconds for which no step is saved where intervals are shorter, so that there are steps to compare with."""
CYCLE = 10
"""Steps, of which one is in a block without saves."""
_ROUNDING = 1e-9
"""Relative excess over a whole number that counts as a rounding error."""


def checked_overhead(overhead: float) -> float:
    """The overhead; raises ConfigError unless it is a part of training time that a job can keep to."""
    if not 1e-6 <= overhead < 1:
        raise ConfigError(
            f"overhead is {overhead}; give the part of training time that checkpoints may cost, from 1e-6 to below 1, "
            "such as 0.035 for 3.5%"
        )
    return overhead


def whole_steps(steps: float) -> int:
    """The smallest whole interval that is not shorter, from 1 to `LONGEST`."""
    # Without the slack, 3.0000000001 steps from a quotient of floats would become 4.
    return max(1, ceil(min(steps * (1 - _ROUNDING), LONGEST)))


@dataclass(frozen=True)
class Intervals:
    """Intervals of snapshots and persists; the same on all ranks.

    Attributes:
        memory: Steps from one snapshot to the next.
        storage: Steps from one persist to the next; a multiple of `memory`.
        anchor: A step with a persist, from which both are counted.
        unsaved: Steps in a row at the end of each `cycle` after which no save is due; 0 for none.
    """

    memory: int
    storage: int
    anchor: int = 0
    unsaved: int = 0

    def __post_init__(self) -> None:
        if self.memory < 1 or self.storage < self.memory or self.storage % self.memory:
            raise ConfigError(
                f"snapshots every {self.memory} steps and persists every {self.storage} do not go together: a persist "
                f"takes a snapshot. Give 1 or more, and for storage a multiple of memory"
            )

    @property
    def cycle(self) -> int:
        """Steps from one block without saves to the next."""
        return multiple(CYCLE * self.unsaved, self.memory)

    def snapshots(self, step: int) -> bool:
        """Return whether a snapshot is due at this step."""
        since = step - self.anchor
        return since > 0 and since % self.memory == 0 and not (self._left_out(since) and not self.persists(step))

    def persists(self, step: int) -> bool:
        """Return whether that snapshot is to be persisted."""
        since = step - self.anchor
        return since > 0 and since % self.storage == 0 and not (self.storage <= self.unsaved and self._left_out(since))

    def _left_out(self, since: int) -> bool:
        """Return whether the step that is so many after the anchor is in a block without saves."""
        return self.unsaved > 0 and 0 < -since % self.cycle <= self.unsaved

    def changed(self, memory: int, storage: int, step: int, unsaved: int = 0) -> Self:
        """Other intervals after this step, counted from the last persist before: the next one keeps its distance."""
        # Counted from the last persist, not from now: else each change of the intervals would put the next one off.
        last = max(0, step - self.anchor) // self.storage * self.storage
        while last and not self.persists(self.anchor + last):
            last -= self.storage
        return type(self)(memory, storage, self.anchor + last, unsaved)


@dataclass(frozen=True)
class Costs:
    """Costs of checkpoints, as far as they decide the frequency.

    Attributes:
        iteration: Seconds of an iteration without any checkpoint.
        snapshot: Seconds by which a snapshot delays training.
        persist: Seconds by which a whole persist delays it.
        duration: Seconds from the beginning of a persisted snapshot until it is durable.
    """

    iteration: float
    snapshot: float
    persist: float = 0.0
    duration: float = 0.0

    def overhead(self, intervals: Intervals) -> float:
        """Part of training time that snapshots and persists cost together."""
        return (self.snapshot / intervals.memory + self.persist / intervals.storage) / self.iteration


@dataclass(frozen=True)
class Fixed:
    """Constraints on the intervals, from users and failures.

    Attributes:
        memory: Steps between snapshots; None to choose.
        storage: Steps between persists; None to choose.
        least: Steps between persists, at least.
    """

    memory: int | None = None
    storage: int | None = None
    least: int = 1


FREE = Fixed()


def fit(costs: Costs, overhead: float, fixed: Fixed = FREE) -> Intervals:
    """The shortest intervals at which snapshots and persists together stay within the overhead, if any can.

    A persist ends at least an iteration before the next begins. The overhead is shared so that the sum of both
    intervals is least. That sum is the work lost by a failure that leaves memory whole, and by one that does not. By
    Lagrange, the shares are as s + sqrt(s c) for memory and c + sqrt(s c) for storage, if a snapshot costs s and a
    persist c. Fixed intervals are kept, and may break the bound.
    """
    least = max(fixed.least, apart(costs))
    budget = overhead * costs.iteration
    if fixed.memory is not None:
        return Intervals(fixed.memory, fixed.storage or _storage(costs, budget, fixed.memory, least))
    if fixed.storage is not None:
        return Intervals(_memory(costs, budget, fixed.storage), fixed.storage)
    pairs = [(memory, _storage(costs, budget, memory, least)) for memory in _candidates(costs, budget, least)]
    # The pair itself breaks ties, so that all ranks choose the same.
    return Intervals(*min(pairs, key=lambda pair: (sum(pair), pair)))


def _candidates(costs: Costs, budget: float, least: int) -> list[int]:
    """Intervals of snapshots, one of which is about the best: the best number of them for each persist, or the most."""
    # An interval of persists is n snapshots long. Without rounding the best n is sqrt(persist / snapshot); if persists
    # must be `least` steps apart, the most that fit. Both are rounded in both directions, and the caller compares.
    snapshot, persist = costs.snapshot, costs.persist
    left = budget - persist / least
    alone = whole_steps(snapshot / left if left > 0 else inf)
    ratios = (min(sqrt(persist / snapshot), LONGEST) if snapshot else 1.0, least / alone)
    times = {max(1, near) for ratio in ratios for near in (floor(ratio), ceil(ratio))}
    return [alone, *(whole_steps(max((snapshot + persist / n) / budget, least / n)) for n in sorted(times | {1}))]


def unsaved_steps(memory: int, iteration: float) -> int:
    """Steps of a block without saves, for snapshots every ``memory`` steps of so many seconds.

    It lasts `UNSAVED`, or a step that is longer: a failure loses that at most, plus the interval. Where snapshots are
    farther apart, steps between them are without a save anyway, and there is no block.
    """
    steps = max(1, floor(min(UNSAVED / iteration, LONGEST)))
    return steps if memory <= steps else 0


def apart(costs: Costs) -> int:
    """The least number of steps between persists so that one ends in time and leaves iterations to compare with."""
    during = costs.duration / costs.iteration
    return max(whole_steps(ROOM * during), whole_steps(during) + 1) if during else 1


def _storage(costs: Costs, budget: float, memory: int, least: int) -> int:
    """The shortest interval of persists for snapshots every ``memory`` steps, a multiple of that.

    If the snapshots alone use the whole budget, persists get a budget of the same size of their own.
    """
    left = budget - costs.snapshot / memory
    share = left if left > budget * _ROUNDING else budget
    wanted = max(least, whole_steps(costs.persist / share) if costs.persist else 1)
    return multiple(wanted, memory)


def _memory(costs: Costs, budget: float, storage: int) -> int:
    """The shortest interval of snapshots that divides ``storage``."""
    left = budget - costs.persist / storage
    least = 1 if costs.snapshot == 0 else whole_steps(costs.snapshot / left) if left > 0 else storage
    return storage // divisor(storage, max(1, storage // least))


def multiple(steps: int, of: int) -> int:
    """The smallest multiple of ``of`` that is not below ``steps``."""
    return -(-steps // of) * of


def divisor(of: int, most: int) -> int:
    """The largest divisor of ``of`` that is not above ``most``, which is at least 1."""
    pairs = ((low, of // low) for low in range(1, isqrt(of) + 1) if of % low == 0)
    return max(part for pair in pairs for part in pair if part <= most)
