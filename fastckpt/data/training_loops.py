"""Ways of a training loop through a loader that decide where a resume goes on."""

import gc
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from fastckpt.errors import ConfigError

States = tuple[dict[str, Any], dict[str, Any]]
"""State common to all ranks, and this rank's own."""


class CycleWatch:
    """Detector of an ``itertools.cycle`` of an iterator: made right after the iterator, asked at its first batch.

    The cycle is made then, too, so it is among the young objects, of which there are few thousand, if none were
    collected meanwhile. If some were, all objects are looked at, which takes 15 to 50 ms.

    Args:
        iterator: Nothing but the cycle has it.
    """

    def __init__(self, iterator: object) -> None:
        # A weak reference, which is no referrer: only the cycle and the loop hold the iterator.
        self._iterator = weakref.ref(iterator)
        self._collections = _older_collections()

    def is_cycled(self) -> bool:
        """Return whether there is such a cycle."""
        iterator = self._iterator()
        if iterator is None:
            return False
        # A list of young objects takes less time than get_referrers, which looks at all.
        referrers: Iterable[object] = (
            gc.get_objects(0) + gc.get_objects(1)
            if _HAS_GENERATIONS and self._collections == _older_collections()
            else gc.get_referrers(iterator)
        )
        cycles = [each for each in referrers if issubclass(type(each), itertools.cycle)]
        return any(iterator is referent for referent in gc.get_referents(*cycles))


_HAS_GENERATIONS = sys.version_info < (3, 14)
"""True while new objects are in the two youngest generations, until the second is collected."""


def _older_collections() -> list[int]:
    """The number of times that objects have left the two youngest generations."""
    return [each["collections"] for each in gc.get_stats()[1:]]


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
        """One more batch; ``states`` is the position after it."""
        self._out.append((states, ended))

    def passed(self) -> None:
        """An epoch was handed out."""
        self._forgotten, self._were_used = not self._were_used, False

    def clear(self) -> None:
        """Drop batches that are handed out but will not be used."""
        self._out.clear()

    def used(self, batches: int) -> list[tuple[States, bool]]:
        """The positions after batches that are used now, with whether the epoch ended there."""
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
        """Check that used batches are counted; raises ConfigError if a whole epoch was handed out and nothing used."""
        if self._forgotten:
            raise ConfigError(
                "an epoch was handed out with ahead=True, but used() never called: the position is unknown. Call "
                "loader.used() after each step, or leave ahead out"
            )
