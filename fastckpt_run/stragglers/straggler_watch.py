"""The watch for slow ranks: sends the windows of this node's workers to the first one, where all ranks are judged."""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fastckpt._core import metrics
from fastckpt._core.memory.step_clock import STEPS
from fastckpt._core.memory.telemetry import PARTS
from fastckpt._core.policy.stragglers import RankTimes, SlowRank
from fastckpt._core.saver.server import Saver
from fastckpt.errors import FastckptError
from fastckpt_run.stragglers.straggler_judge import NANO, StragglerJudge
from fastckpt_run.watch.node_channel import NodeChannel

if TYPE_CHECKING:
    from fastckpt_run.watch.watcher import WatchedWorkers

logger = logging.getLogger("fastckpt.launcher")

SUBJECT = "step_windows"
TIMEOUT = 5.0
"""Seconds that the first node may take to answer."""
INTERVAL = 1.0
LOOKS = 1000
"""Number of records, as of the events on progress, that a job may have each time it grows e times older."""
_WARM_UP = 1
"""Windows after a start that are not compared: first steps compile, allocate and order buckets."""

Row = list[int]
"""A window in a message: its number, its own time, and its parts, in nanoseconds."""


class StragglerWatch:
    """Finds slow ranks of the job. Each node sends its windows; the first one judges, logs and records, and alone
    has `slow` and `times`.

    Args:
        saver: Has the windows of this node.
        channel: Reaches the first node.
        workers: The workers of this node that run now.
    """

    def __init__(self, saver: Saver, channel: NodeChannel, workers: "Callable[[], WatchedWorkers]") -> None:
        self._saver, self._channel, self._workers = saver, channel, workers
        self._host = socket.gethostname()
        self._since = 0
        self._sent = dict[int, int]()
        self._begun = self._recorded = time.monotonic()
        self._judge = StragglerJudge()
        channel.answer(SUBJECT, self._judge.receive)

    @property
    def slow(self) -> Mapping[int, SlowRank]:
        """The slow ranks of now, by rank."""
        return self._judge.slow

    @property
    def times(self) -> Mapping[int, RankTimes]:
        """The last window of all ranks, by rank."""
        return self._judge.times

    def look(self) -> None:
        """Send the windows that workers have closed since the last look; called each second."""
        workers = self._workers()
        if workers.since != self._since:
            self._since, self._sent = workers.since, {}
            self._judge.begin(workers.world_size)
        rows = self._new_rows(workers)
        if not rows:
            return
        self._record(rows)
        body = {"since": self._since, "host": self._host, "ranks": {str(rank): each for rank, each in rows.items()}}
        try:
            self._channel.ask_first(SUBJECT, body, TIMEOUT)
        except (FastckptError, OSError) as error:
            # The next look sends them again, as far as workers still have them.
            logger.debug("the windows of this node were not sent: %s", error)
            return
        self._sent |= {rank: each[-1][0] for rank, each in rows.items()}

    def _new_rows(self, workers: "WatchedWorkers") -> dict[int, list[Row]]:
        """New windows by rank; of several checkpoint directories a worker reports to one."""
        telemetry, rows = self._saver.telemetry(), dict[int, list[Row]]()
        for directory, windows in self._saver.windows().items():
            for local_rank, (last, of_rank) in enumerate(zip(telemetry.get(directory, ()), windows, strict=False)):
                rank = workers.ranks.get(local_rank)
                # The telemetry block outlives workers: a sign of life from before this start is a predecessor's.
                if rank is None or last.beat < workers.since:
                    continue
                sent = self._sent.get(rank, _WARM_UP)
                if new := [[one.number, one.own, *one.parts] for one in of_rank if one.number > sent]:
                    rows[rank] = new
        return rows

    def _record(self, rows: Mapping[int, Sequence[Row]]) -> None:
        now = time.monotonic()
        if now - self._recorded < max(INTERVAL, (now - self._begun) / LOOKS):
            return
        self._recorded = now
        ranks = [
            {"rank": rank, "window": each[-1][0], **dict(zip(("own", *PARTS), _seconds(each[-1]), strict=True))}
            for rank, each in sorted(rows.items())
        ]
        metrics.event("rank_times", steps=STEPS, ranks=ranks)


def _seconds(row: Row) -> list[float]:
    return [round(value * NANO, 9) for value in row[1:]]
