"""One persist at a time: one that is due while another is under way is put off, on all ranks alike."""

from fastckpt._core.client.collective import Agreement
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.schedule.delayed_gather import DelayedGather
from fastckpt._core.schedule.stopwatch import Stopwatch


class PersistGate:
    """Decides which persists may begin, so that a job that loses its memory goes back by one of them at most.

    After "at most one checkpoint" of CheckFreq (Mohan et al., FAST'21). There the snapshot waits, and
    training with it; here the snapshot is made, and a later one is persisted in its place.

    Args:
        ranks: The agreement to use; in use for nothing else.
        watch: Knows whether a persist is under way.
        notice: Turns before a persist is due at which ranks send each other whether they
            are idle, so that nobody waits for the slowest.
    """

    def __init__(self, ranks: Agreement, watch: Stopwatch, notice: int) -> None:
        self._gather, self._watch, self._notice = DelayedGather(ranks), watch, notice
        self._owed = False

    def begins(self, turn: int, intervals: Intervals) -> bool:
        """Return whether to persist this turn's snapshot: one is due, or was put off, and none is under way."""
        # A persist that was put off may begin with any snapshot; until then the intervals of storage decide.
        every, due = (intervals.memory, intervals.snapshots) if self._owed else (intervals.storage, intervals.persists)
        # Sent early, read when due: by then the values of all ranks have arrived, and nobody waits.
        ahead = min(self._notice, every - 1)
        if not self._gather.pending and (due(turn) or due(turn + ahead)):
            self._gather.send(self._watch.idle, turn + ahead)
        if not due(turn):
            return False
        idle = self._gather.poll(turn)
        # One rank that still persists is enough: a checkpoint is durable only with the parts of all.
        free = idle is not None and all(idle)
        if intervals.persists(turn) and not free:
            self._watch.overran()
        self._owed = not free
        return free
