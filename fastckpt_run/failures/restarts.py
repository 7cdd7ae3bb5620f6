"""Decide after each failure whether the workers are started again, and log why if not."""

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.error_codes import coded
from fastckpt._core.memory.headroom import killed_for_memory
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.restarts import (
    Attempt,
    Course,
    Stretch,
    TrainingPosition,
    given_back,
    is_stuck,
    parse_budget,
)
from fastckpt_run.failures.cannot_start import broken_syntax, mentions_fastckpt, why_not_started
from fastckpt_run.failures.cause import last_words
from fastckpt_run.failures.deaths import describe, is_from_outside
from fastckpt_run.script import script_of

logger = logging.getLogger("fastckpt.launcher")

_REMEDY = """\
Another start would go the same way. Find the cause in what the workers printed, and launch the job here again: it
resumes the newest checkpoint. If the cause is not in the job, allow more with --fast-max-stalls; 0 is any number."""
_SHOWN = 5
"""Failures that the message about it has a line of."""


class Restarts:
    """The outcome of all starts of a node's workers, according to the telemetry, and the decision on another start.

    Attributes:
        limit: The value of --max-restarts.
        may_go_on: True if the last failure came from outside of the script: another launch may get further.
    """

    def __init__(
        self,
        settings: Settings,
        spec: WorkerSpec,
        telemetry: Callable[[], Mapping[str, Sequence[Telemetry]]],
        last_words: Callable[[int], str],
        hung: Container[int],
    ) -> None:
        """Remember the sources.

        Args:
            settings: Of the job.
            spec: Specification of the workers.
            telemetry: Their progress, by checkpoint directory.
            last_words: Traceback with which a pid ended, if that is known; else empty.
            hung: The pids that were killed for that.
        """
        self.limit = spec.max_restarts
        self.may_go_on = False
        self._script = script_of(spec)
        self._max_stalls = settings.max_stalls
        self._budget = parse_budget(settings.restart_budget)
        self._telemetry = telemetry
        self._last_words = last_words
        self._hung = hung
        self._course = Course()
        self._trained = 0.0
        self._watched = False
        self.started()

    def started(self) -> None:
        """The workers are started: older telemetry is not theirs."""
        self._start, self._killed_for_memory = time.monotonic_ns(), killed_for_memory()

    def interrupted(self) -> None:
        """The workers are to be restarted though none of them has failed, for instance because a node joins."""
        self._end(failed=False)

    def would_restart(self, left: int) -> bool:
        """Return whether workers that failed now would be started again, with ``left`` restarts left."""
        if not is_stuck([*self._course.stalled, Attempt()], self._max_stalls):  # even if this one stalls
            return left > 0
        return left > 0 and not is_stuck(self._course.followed_by(self._attempt()).stalled, self._max_stalls)

    def failed(self, failures: Mapping[int, ProcessFailure], workers: PContext | None, left: int) -> int:
        """The workers have failed; by how much that changes the restarts that are ``left``, up or down to none."""
        stopped = getattr(workers, "stopped", ())
        # 1. who failed by itself   2. how far the attempt came   3. a script that cannot start   4. too many failures
        # in a row without progress   5. restarts given back for progress   6. whether any is left
        culprits = {rank: failure for rank, failure in failures.items() if failure.local_rank not in stopped}
        began = bool(self._course.attempts) or any(self._telemetry_of_start().values())
        killed = [f for f in culprits.values() if is_from_outside(f.exitcode)]
        self._end(failed=True, killed=self._says_nothing(killed), why=self._described(culprits))
        self.may_go_on = bool(killed) or any(f.pid in self._hung for f in culprits.values())
        if not self.limit:
            return 0
        if not began and (why := self._cannot_start(culprits.values(), workers)):
            text = coded(f"no restart: the script cannot start: {why}", "FC-029")
            return self._give_up("cannot_start", text, left)
        if is_stuck(self._course.stalled, self._max_stalls):
            self.may_go_on = False
            return self._give_up("stalled", self._explanation(self._course.stalled), left)
        back = self._give_back(left)
        if not left + back:
            text = coded(f"no restart: --max-restarts allows {self.limit}, and none is left", "FC-027")
            self._give_up("spent", text, left)
        return back

    def _telemetry_of_start(self) -> dict[str, list[Telemetry]]:
        """The telemetry of the workers since they were started."""
        telemetry = self._telemetry()
        return {
            directory: [line for line in lines if line.beat >= self._start] for directory, lines in telemetry.items()
        }

    def _attempt(self, why: str = "") -> Attempt:
        """The progress that an attempt has made if the workers fail now."""
        telemetry = self._telemetry_of_start()
        # Once watched, always: an attempt that dies before it opens its checkpointer has made no progress.
        self._watched |= any(telemetry.values())
        stretches = {
            directory: _stretch(lines) for directory, lines in telemetry.items() if any(map(_has_moved, lines))
        }
        return Attempt(self._watched, stretches, max(map(_seconds, telemetry.values()), default=0.0), why=why)

    def _says_nothing(self, killed: Iterable[ProcessFailure]) -> bool:
        """Return whether kills prove nothing about the script: not those for a hang, or for lack of memory."""
        # Of the others, which lost their peer, some may have failed by an exception before they were stopped.
        return any(f.pid not in self._hung for f in killed) and killed_for_memory() == self._killed_for_memory

    def _end(self, *, failed: bool, killed: bool = False, why: str = "") -> None:
        attempt = self._attempt(why)
        # Only time with progress earns restarts back: else a job
        # that fails every hour at one step would go on for ever.
        if attempt not in self._course.followed_by(attempt).stalled[-1:]:
            self._trained += attempt.seconds
        number = self._course.attempts + 1
        self._course = self._course.followed_by(replace(attempt, failed=failed, killed=killed, number=number))

    def _described(self, failures: Mapping[int, ProcessFailure]) -> str:
        hows = {rank: "hung" if f.pid in self._hung else describe(f.exitcode) for rank, f in failures.items()}
        return ", ".join(f"worker {rank} {how}" for rank, how in hows.items())

    def _give_back(self, left: int) -> int:
        if self._budget is None:
            return 0
        restarts, self._trained = given_back(self._budget, self._trained, self.limit - left)
        if restarts:
            metrics.event("restarts_given_back", restarts=restarts, restarts_left=left + restarts)
            logger.info("training went on: %d of %d restarts are left again", left + restarts, self.limit)
        return restarts

    def _give_up(self, why: str, text: str, left: int) -> int:
        metrics.event("gave_up", why=why, text=text, restarts_left=left)
        logger.error("%s", text)
        return -left

    def _explanation(self, stalled: Sequence[Attempt]) -> str:
        lines = [f"  start {attempt.number} {_course(attempt)}: {attempt.why}" for attempt in stalled[-_SHOWN:]]
        if before := len(stalled) - len(lines):
            lines.insert(0, f"  {before} starts before")
        times = "once" if len(stalled) == 1 else f"{len(stalled)} times in a row"
        head = f"no restart: the workers failed {times} before they came further than before (--fast-max-stalls):"
        return coded("\n".join([head, *lines, _REMEDY]), "FC-028")

    def _cannot_start(self, failures: Iterable[ProcessFailure], workers: PContext | None) -> str:
        """The reason why the script cannot start; empty unless that is certain."""
        for failure in failures:
            words = last_words(failure, self._last_words(failure.pid), workers)
            why = why_not_started(words, failure.exitcode) if words else self._guess(failure.exitcode)
            if why:
                return why
        return ""

    def _guess(self, exitcode: int) -> str:
        """The same, of a worker without known last words."""
        if self._script is None:
            return ""
        if exitcode == 1:
            return broken_syntax(self._script)
        if exitcode == 2 and mentions_fastckpt(self._script):
            return "exit code 2, as of refused arguments, before it had a checkpointer"
        return ""


def _has_moved(line: Telemetry) -> bool:
    return line.step >= 0 or line.steps > 0


def _stretch(lines: Sequence[Telemetry]) -> Stretch:
    reached = (TrainingPosition(line.step, line.steps - line.named) for line in lines)
    return Stretch(max(line.loaded for line in lines), max(reached))


def _seconds(lines: Sequence[Telemetry]) -> float:
    firsts = [line.first for line in lines if line.first]
    return (max(line.beat for line in lines) - min(firsts)) / 1e9 if firsts else 0.0


def _course(attempt: Attempt) -> str:
    """The progress of an attempt, in words."""
    if not attempt.stretches:
        return "ended before anything was loaded or done"
    ways = []
    for directory, (resumed, (step, since)) in attempt.stretches.items():
        begin = f"resumed step {resumed}" if resumed >= 0 else "started fresh"
        end = f"came to step {step}" if step > resumed else "came"
        further = f" {since} steps further" if since else ""
        ways.append(
            f"{begin} and {end}{further}{f' in {directory}' if len(attempt.stretches) > 1 else ''}"
            if further or step > resumed
            else f"{begin} and came no step further"
        )
    return "; ".join(ways)
