"""Intervals that users ask for: a number of steps, a time, or as often as the overhead allows."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fastckpt._core.policy.frequency.intervals import LONGEST, Fixed, divisor, multiple
from fastckpt.errors import ConfigError

Often = int | timedelta | None
"""Steps, a time, or None: automatically."""


@dataclass(frozen=True)
class RequestedIntervals:
    """Intervals of snapshots and persists that a user asks for."""

    memory: Often = None
    storage: Often = None

    @property
    def automatic(self) -> bool:
        """Return whether an interval is left to choose, or follows the clock."""
        return not (isinstance(self.memory, int) and isinstance(self.storage, int))

    def fixed(self, iteration: float, least: int = 1) -> Fixed:
        """The intervals in steps, for iterations of so many seconds.

        A time is rounded to fit steps: for storage to a multiple of the interval of memory, for memory to a divisor of
        that of storage.
        """
        memory, storage = _steps(self.memory, iteration), _steps(self.storage, iteration)
        if memory and storage:
            # A number of steps is kept exactly as given; the time gives way.
            memory = divisor(storage, memory) if isinstance(self.storage, int) else memory
            storage = multiple(storage, memory)
        return Fixed(memory, storage, least)


AUTO = RequestedIntervals()


def parse(every: Any) -> RequestedIntervals:
    """Read the argument ``every``; raises ConfigError.

    Args:
        every: "auto"; a number of steps or a timedelta, for memory and storage alike; or a mapping with one of these
            each for "memory" and "storage". A missing one is automatic.
    """
    if not isinstance(every, Mapping):
        often = _often("every", every)
        return RequestedIntervals(often, often)
    if unknown := [name for name in every if name not in ("memory", "storage")]:
        raise ConfigError(f"every has {unknown[0]!r}; it may have 'memory' and 'storage', such as {{'storage': 100}}")
    memory, storage = (_often(f"every[{name!r}]", every.get(name, "auto")) for name in ("memory", "storage"))
    if isinstance(memory, int) and isinstance(storage, int) and storage % memory:
        raise ConfigError(
            f"every is {memory} steps for memory and {storage} for storage; a persist takes what a snapshot has put "
            f"into memory: give storage a multiple of memory, such as {multiple(storage, memory)}"
        )
    if isinstance(memory, timedelta) and isinstance(storage, timedelta) and storage < memory:
        raise ConfigError(
            f"every is {memory} for memory and {storage} for storage; a persist takes what a snapshot has put into "
            f"memory: give memory {storage} or less"
        )
    return RequestedIntervals(memory, storage)


def _often(name: str, value: Any) -> Often:
    if isinstance(value, str) and value == "auto":
        return None
    if isinstance(value, timedelta):
        if value <= timedelta(0):
            raise ConfigError(f"{name} is {value}; give a time above 0")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= LONGEST:
            raise ConfigError(f"{name} is {value} steps; give 1 to {LONGEST}")
        return value
    raise ConfigError(f"{name} is {value!r}; give 'auto', a whole number of steps, or a timedelta")


def _steps(often: Often, iteration: float) -> int | None:
    if isinstance(often, timedelta):
        return max(1, round(min(often.total_seconds() / iteration, LONGEST)))
    return often
