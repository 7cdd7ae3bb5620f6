"""Measures what training and its checkpoints take on this rank, step by step."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fastckpt import metrics
from fastckpt.engine.beats import Beats, marked
from fastckpt.format.ids import SaveId
from fastckpt.ipc.messages import Status
from fastckpt.policy.overhead import Iteration

MOST = 16
"""Snapshots of which it is remembered how long they took."""


class Stopwatch:
    """What the iterations of this rank take, and the persists that were asked for.

    Attributes:
        durations: Seconds of each persist that has ended, from the beginning of its snapshot; their reader clears it.
        overruns: How many persists were asked for while one was under way.
        failed: Whether the newest persist has failed for good.
        copies: Seconds that it took to copy each snapshot, whether training waited for that or not.
        blocks: Of each, those in which training could not go on.
    """

    def __init__(self, beats: Beats, glance: Callable[[], Status | None]) -> None:
        self.durations: list[float] = []
        self.overruns = 0
        self.failed = False
        self.copies: deque[float] = deque(maxlen=MOST)
        self.blocks: deque[float] = deque(maxlen=MOST)
        self._beats, self._glance = beats, glance
        self._under_way: deque[tuple[SaveId, float]] = deque()
        self._begun = self._stalled = self._marked = self._copied = 0.0
        self._overlaps = metrics.counts["overlap.copy"]
        self._had_snapshot = self._had_persist = False
        self._update = self._update_begun = 0.0
        self._hooks = [
            register_optimizer_step_pre_hook(self._update_begins),
            register_optimizer_step_post_hook(self._update_ends),
        ]

    def turn(self) -> tuple[Iteration, float] | None:
        """A step is done, and a checkpoint may begin: the iteration since the last turn, and seconds of its update.

        None for the first one, and for one that nothing can be said of.
        """
        now, stalled, marks = time.monotonic(), self._beats.stalled, marked()
        seconds, stall = now - self._begun - (marks - self._marked), stalled - self._stalled
        iteration = None
        if self._begun and 0 <= stall <= seconds:
            iteration = Iteration(seconds, stall, 0.0, self._had_snapshot, self._had_persist)
        if self._had_snapshot and self._copied:
            overlapped = metrics.counts["overlap.copy"] - self._overlaps
            self.blocks.append(self._copied)
            self.copies.append(self._copied + (metrics.seconds["overlap.copy"] if overlapped else 0.0))
        update, self._update = self._update, 0.0
        self._begun, self._stalled, self._marked, self._had_snapshot = now, stalled, marks, False
        self._look()
        self._had_persist = bool(self._under_way)
        return (iteration, update) if iteration else None

    def saved(self, save: SaveId | None, *, persist: bool) -> None:
        """A snapshot was taken since the last turn, and is to be persisted; None if it was skipped."""
        self._had_snapshot = True
        self._overlaps = metrics.counts["overlap.copy"]
        self._copied = self._beats.stalled - self._stalled if save is not None else 0.0
        if save is not None and persist:
            self.overruns += bool(self._under_way)
            self.failed = False
            self._under_way.append((save, self._begun))
            self._had_persist = True

    def _look(self) -> None:
        """See which persists have ended."""
        status = self._glance() if self._under_way else None
        if status is None:
            return
        durable = SaveId(*status.newest) if status.newest else None
        while self._under_way and durable is not None and self._under_way[0][0] <= durable:
            save, begun = self._under_way.popleft()
            if save == durable and status.since > begun:
                self.durations.append(status.since - begun)
        if self._under_way and not status.waiting and status.trouble:
            self._under_way.clear()
            self.failed = True

    def close(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()

    def _update_begins(self, optimizer: Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self._update_begun = time.monotonic()

    def _update_ends(self, optimizer: Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self._update += time.monotonic() - self._update_begun

    # As torch.compiler.disable would, without importing the compiler: a compiled optimizer calls them as they are.
    _update_begins._torchdynamo_disable = True  # type: ignore[attr-defined]
    _update_ends._torchdynamo_disable = True  # type: ignore[attr-defined]
