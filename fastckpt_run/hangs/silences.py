"""Silence of workers: the time that they are at one place, and the reports of it."""

import time
from collections.abc import Callable, Collection, Mapping

from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.stack_groups import Frame

_LOOKS = 3
"""Looks at equal stacks after which workers count as waiting."""
_LATER = 1.25
"""Factor by which workers are silent for longer at each look than at the one before."""

Stacks = Mapping[int, tuple[Frame, ...]]
"""The frames of each worker's main thread."""


class Stillness:
    """Times for which workers have been at the same places while they use the processor: a wait over NCCL spins."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Look at new workers, or at those that have gone on."""
        self._stacks: Stacks | None = None
        self._since, self._looks, self._next = 0.0, 0, 0.0

    def seconds(self, now: float, silent: float, allowed: float, look: Callable[[], Stacks]) -> float:
        """Seconds for which workers have not gone on, if several looks found them at the same places, else 0.

        Args:
            now: By the monotonic clock.
            silent: Seconds since one of them reported.
            allowed: Seconds of silence before the first look.
            look: Takes their stacks.
        """
        if silent < allowed:
            self.begin()
        elif silent >= self._next:
            self._next = silent * _LATER
            stacks = look()
            if stacks != self._stacks:
                self._stacks, self._since, self._looks = stacks, now, 0
            self._looks += bool(stacks) and all(stacks.values())  # one without a stack may be anywhere
        return allowed + now - self._since if self._looks >= _LOOKS else 0.0


class Silences:
    """Reports on silent workers since they were started, and the places of those before them.

    Attributes:
        told: Seconds of silence at the last report; 0 if there was none since they went on.
        at: Time of that report, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.told = self.at = 0.0
        self._spared = 0
        self._where = self._before = (frozenset[str](), -1)

    def begin(self) -> None:
        """Watch new workers."""
        self._before, self._where = self._where, (frozenset[str](), -1)
        self.end()

    def end(self) -> None:
        """Count from 0 again."""
        self.told, self._spared = 0.0, 0

    def gone_on(self) -> None:
        """Note that workers have gone on, so that their end, if it comes, is another's."""
        self._where = frozenset[str](), -1
        self.end()

    def is_due(self, silent: float, limits: int) -> bool:
        """Return whether workers need a close look: they are ``silent`` for so long, beyond so many of their limits."""
        return silent >= 2 * self.told or limits > self._spared

    def note(self, silent: float, places: Collection[str], lines: Collection[Telemetry], spared: int = 0) -> None:
        """Note where workers are that are reported, or killed, or ``spared`` beyond so many of their limits."""
        self.told, self.at, self._spared = silent, time.monotonic(), spared
        self._where = frozenset(places), _newest(lines)

    def is_again(self, places: Collection[str], lines: Collection[Telemetry]) -> bool:
        """Return whether the workers before ended silent at the same places, and these have come no further."""
        before, step = self._before
        is_known = bool(before) and "" not in before
        return is_known and before == frozenset(places) and step >= _newest(lines)


def _newest(lines: Collection[Telemetry]) -> int:
    """Return the progress of workers: the newest step that one has named, and the steps that it has done since."""
    return max([line.step + line.steps - line.named for line in lines], default=-1)
