"""Reports of loads: to the saver, the telemetry, the record of a proof, and the log."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastckpt._core.client import run_record
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.heartbeat import Heartbeat
from fastckpt._core.resume.resume import ResumeResult

logger = logging.getLogger("fastckpt")


class LoadReports:
    """Reports the loads of one worker, once they count.

    Args:
        link: To the saver, which reports to the launcher.
        beats: The telemetry of this worker.
        rank: The first one logs.
    """

    def __init__(self, link: SaverClient, beats: Heartbeat, rank: int) -> None:
        self._link, self._beats, self._rank = link, beats, rank
        self._waiting: list[tuple[ResumeResult, float]] | None = None

    @contextmanager
    def applying(self, describe: Callable[[], tuple[str, str]]) -> Iterator[None]:
        """Report loads made in this context at its end, and none if that is an error: objects may refuse a state.

        Args:
            describe: Gives the position in the data that was loaded, and the changes since; either may be empty.
        """
        self._waiting = []
        try:
            yield
            for resumed, seconds in self._waiting:
                self._report(resumed, seconds, *(describe() if resumed.state is not None else ("", "")))
        finally:
            self._waiting = None

    def loaded(self, resumed: ResumeResult, seconds: float) -> None:
        """Report a load, or that there was nothing to load; within `applying` at its end."""
        if self._waiting is None:
            self._report(resumed, seconds, "", "")
        else:
            self._waiting.append((resumed, seconds))

    def nothing(self) -> None:
        """Report that there was nothing to load."""
        self._link.report_loaded(None, "", 0.0)
        run_record.note("fresh")

    def _report(self, resumed: ResumeResult, seconds: float, place: str, changes: str) -> None:
        if resumed.state is None:
            self.nothing()
            return
        self._link.report_loaded(resumed.id, resumed.tier, seconds)
        step = resumed.id.step if resumed.id else -1
        run_record.note("loaded", step, tier=resumed.tier)
        self._beats.resume(step)
        if self._rank == 0:
            level, more = (logging.WARNING, f"; {changes}") if changes else (logging.INFO, "")
            logger.log(level, "resumed step %d%s from %s in %.2f s%s", step, place, resumed.tier, seconds, more)
