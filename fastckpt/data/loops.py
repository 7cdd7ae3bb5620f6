"""How a training loop goes through a loader, as far as that decides where a resume goes on."""

import gc
import itertools
from collections import deque
from typing import Any

from fastckpt.errors import ConfigError

States = tuple[dict[str, Any], dict[str, Any]]
"""What all ranks have in common, and what this one has beside it."""


def is_cycled(iterator: object) -> bool:
    """Whether an ``itertools.cycle`` has this iterator. Looks at all objects: 50 ms and more."""
    return any(isinstance(each, itertools.cycle) for each in gc.get_referrers(iterator))


class Ahead:
    """Batches that are handed out and not yet used, by a loop that fetches ahead of its training.

    Attributes:
        ended: Whether the batch used last was the last of its epoch.
    """

    def __init__(self) -> None:
        self.ended = False
        self._out: deque[tuple[States, bool]] = deque()
        self._were_used = self._forgotten = False

    def handed_out(self, states: States, *, ended: bool) -> None:
        """One more batch; ``states`` is the position behind it."""
        self._out.append((states, ended))

    def passed(self) -> None:
        """An epoch was handed out."""
        self._forgotten, self._were_used = not self._were_used, False

    def clear(self) -> None:
        """What is handed out will not be used."""
        self._out.clear()

    def used(self, batches: int) -> list[tuple[States, bool]]:
        """The positions behind batches that are used now, with whether the epoch ended there."""
        if isinstance(batches, bool) or not isinstance(batches, int) or not 0 < batches <= len(self._out):
            raise ConfigError(
                f"used({batches!r}), but {len(self._out)} batches are handed out and not used: give how many the step "
                "has used, once for each step"
            )
        self._were_used, self._forgotten = True, False
        taken = [self._out.popleft() for _ in range(batches)]
        self.ended = taken[-1][1]
        return taken

    def check(self) -> None:
        """See that somebody counts; raises ConfigError if a whole epoch was handed out and nothing used."""
        if self._forgotten:
            raise ConfigError(
                "an epoch was handed out with ahead=True, but used() never called: the position is unknown. Call "
                "loader.used() after each step, or leave ahead out"
            )
