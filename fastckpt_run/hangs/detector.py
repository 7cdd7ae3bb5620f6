"""Detection of workers that hang: log which and where, and kill the culprit, which is then handled as any death."""

import logging
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.elastic.agent.server.api import Worker

from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.hangs import Observation, hung, limits, occupied
from fastckpt._core.policy.stack_groups import StackGroups, blamed_here, grouped
from fastckpt.errors import FastckptError, ProtocolError
from fastckpt_run.failures.deaths import peek
from fastckpt_run.hangs import hang_record
from fastckpt_run.hangs.hang_record import Hang
from fastckpt_run.hangs.process_activity import Activity
from fastckpt_run.hangs.stack_exchange import Collected, NodeReport, StackExchange
from fastckpt_run.hangs.step_times import Lines, StepTimes, Waits
from fastckpt_run.hangs.worker_inspection import KEPT, NOTHING, NodeWorkers
from fastckpt_run.left_processes import kill_group
from fastckpt_run.watch.node_channel import NodeChannel

logger = logging.getLogger("fastckpt.launcher")

_DEATH_TIMEOUT = 5.0
"""Seconds in which a culprit that was killed is dead, unless the kernel does not let it."""
_REMEMBERED = 86400.0
"""Seconds for which a hang is remembered, in case it was none."""
_FRESH = 2.0
"""Seconds for which stacks that another node has asked for are good enough to judge by."""

_HANDLING = 15.0
"""Seconds for which the main thread does not look because it collects stacks, at most."""
_ASK_AGAIN = 10.0
"""Seconds after which other nodes are asked again whether nobody there does anything."""
_SHORT = 0.25
"""Seconds of silence before /proc is read to see whether a worker runs."""


@dataclass(frozen=True)
class _Seen:
    """The last look at the telemetry, for threads that answer other nodes."""

    workers: NodeWorkers
    at: float = 0.0
    sights: Mapping[int, Observation] = field(default_factory=dict)
    is_occupied: bool = False
    is_idle: bool = False


class HangWatch:
    """Reads the telemetry of the workers of this node, and finds those that hang by the limits of ``setting``.

    Args:
        setting: "auto", "off" or seconds.
        read: The last telemetry of each local rank, by checkpoint directory.
        channel: To the agents of other nodes; None for a node alone.

    Attributes:
        killed: The pids of workers that were killed because they hung, since they were started last.
    """

    def __init__(
        self,
        setting: str,
        read: Callable[[], Mapping[str, Sequence[Telemetry]]],
        channel: NodeChannel | None = None,
    ) -> None:
        self._setting = setting
        self._read = read
        self._exchange: StackExchange | None = None
        if channel is not None:
            self._exchange = StackExchange(channel, self._report, self._is_idle, self._take_note)
        self._host = socket.gethostname()
        self._workers = NodeWorkers({}, ())
        self._known: set[int] = set()
        self.killed: set[int] = set()
        self._hangs: list[float] = []
        self._asked_idle = 0.0
        self._step_times = StepTimes()
        self._waits = Waits()
        # Silence counts from here on only: before, the whole machine may have been suspended, this process included.
        self._awake = self._looked = self._workers.started
        self._seen = _Seen(self._workers)
        self._activity = Activity((), self._awake)

    @property
    def interval(self) -> float:
        """Seconds between two looks, at most."""
        if self._setting == "off":
            return math.inf
        return 1.0 if self._setting == "auto" else min(1.0, float(self._setting) / 10)

    def started(self, pids: Mapping[int, int], workers: Sequence[Worker]) -> None:
        """Watch new workers of this node, whose processes are given by local rank."""
        self.killed.clear()
        self._workers = NodeWorkers(pids, workers)
        self._awake = self._looked = self._workers.started
        self._seen = _Seen(self._workers)
        self._activity = Activity(pids.values(), self._awake)
        self._waits.begin()
        self._step_times.begin(self._awake)

    @property
    def is_due(self) -> bool:
        """Whether it is time for another look: what waits for deaths wakes up more often."""
        return time.monotonic() - self._looked >= 0.9 * self.interval

    def end_hang(self, *, may_restart: bool) -> bool:
        """If the job hangs, log the hang and kill the culprits; return whether it did.

        It takes some seconds to collect the workers' stacks, and those of other nodes.

        Args:
            may_restart: Whether there would be a restart, so that an error can be made good.
        """
        hang = self._look(may_restart=may_restart)
        if hang is not None:
            hang_record.log(hang, self._workers)
            self._kill(hang)
        return hang is not None

    def _look(self, *, may_restart: bool) -> Hang | None:
        # 1. telemetry, and whether this process itself was suspended   2. limits, from the slowest recent step   3. who
        # is silent for longer   4. a close look at these
        if self._setting == "off":
            return None
        now = time.monotonic()
        passed = self._notice_pause(now)
        lines = self._lines(self._workers)
        self._step_times.see(lines)
        self._hangs = [when for when in self._hangs if now - when < _REMEMBERED]
        allowed = limits(
            self._setting,
            self._step_times.slowest(now),
            len(self._hangs),
            start=self._step_times.start,
            sees_all=self._workers.sees_all or self._exchange is not None,
            may_restart=may_restart,
        )
        sights = self._observations(now, lines)
        if is_occupied := occupied(list(sights.values()), allowed):
            self._waits.advance(passed)
        idle = self._idle(now, lines) if math.isfinite(allowed.idle) else 0.0
        ranks = hung(list(sights.values()), allowed, idle)
        # Found by the other limits, or by the one on idleness alone, which with several nodes has to hold for all.
        is_late = bool(hung(list(sights.values()), replace(allowed, idle=math.inf), idle))
        is_idle = idle > allowed.idle and (bool(ranks) or not sights)
        self._seen = _Seen(self._workers, now, sights, is_occupied, is_idle)
        if ranks and not is_late and not self._workers.sees_all and not self._all_idle(now):
            return None
        return self._inspect(lines, sights, ranks, is_late=is_late) if ranks else None

    def _all_idle(self, now: float) -> bool:
        """Whether nobody does anything on other nodes either; False, too, if they were asked a moment ago."""
        if self._exchange is None or now - self._asked_idle < _ASK_AGAIN:
            return False
        self._asked_idle = now
        is_idle = self._exchange.all_idle()
        self._looked = time.monotonic()  # the wait for an answer is no pause of this process
        return is_idle

    def _kill(self, hang: Hang) -> None:
        """Kill the culprits; all workers, if none of those can be killed."""
        # Counted before the kill: under "auto" each alarm doubles the limits, in case this one was false.
        self._hangs.append(time.monotonic())
        self._reset_silence()
        workers = self._workers
        for ranks in (hang.culprits, workers.pids):
            running = [workers.pids[rank] for rank in ranks if workers.is_alive(rank)]
            for pid in running:
                kill_group(pid)
            self.killed.update(running)
            end = time.monotonic() + _DEATH_TIMEOUT
            while running and time.monotonic() < end:  # one death is enough: torch stops the other workers after it
                # A process in uninterruptible sleep (D) does not die of
                # SIGKILL until the kernel returns: then all are killed.
                if any(peek(pid) is not None for pid in running):
                    return
                time.sleep(0.001)

    def _notice_pause(self, now: float) -> float:
        """Seconds since the last look; too many mean that this process was suspended."""
        passed, self._looked = now - self._looked, now
        # A suspended machine, or an agent that was stopped: the workers' silence meanwhile is no sign of a hang.
        if passed > 2 * self.interval + 1.0:
            self._reset_silence()
        return passed

    def _reset_silence(self) -> None:
        """Silence so far does not count."""
        self._awake = time.monotonic()
        self._waits.begin()

    def _lines(self, workers: NodeWorkers) -> dict[int, Telemetry]:
        """The last telemetry of each worker since its start; that of an open checkpointer has priority."""
        found: dict[int, Telemetry] = {}
        for directory in self._read().values():
            for rank, line in enumerate(directory):
                if line.beat > workers.started * 1e9 and rank in workers.pids:
                    found[rank] = max(found.get(rank, line), line, key=lambda line: (line.pid > 0, line.beat))
        return found

    def _idle(self, now: float, lines: Lines) -> float:
        spoken = max([line.beat / 1e9 for line in lines.values()], default=now)
        return self._activity.idle(now, max(spoken, self._awake))

    def _observations(self, now: float, lines: Lines) -> dict[int, Observation]:
        """All running ranks that have a checkpointer, or had one when they were restarted."""
        # A pid of 0 marks a closed checkpointer; a rank without a line was restarted and has not opened one yet.
        self._known |= {rank for rank, line in lines.items() if line.pid}
        self._known -= {rank for rank, line in lines.items() if not line.pid}
        found = {}
        for rank in self._known & self._workers.pids.keys():
            line = lines.get(rank, NOTHING)
            silent, waited = now - max(line.beat / 1e9, self._awake), self._waits.of(rank, line.beat)
            if silent < _SHORT or self._workers.runs(rank, line.pid):
                found[rank] = Observation(rank, silent, line.steps, line.phase, line.allowed / 1e9, waited)
        return found

    def _inspect(
        self, lines: Lines, sights: Mapping[int, Observation], ranks: Sequence[int], *, is_late: bool
    ) -> Hang | None:
        """Inspect workers closely when ``ranks`` seem to hang; None if they do not after all.

        Unless one ``is_late``, they hang only if nobody on any node does anything.
        """
        # 1. a close look: debuggers, processor time, stacks   2. telemetry again: workers may have gone on meanwhile
        # 3. the stacks of other nodes   4. telemetry again   5. the culprits
        workers = self._workers
        look = workers.inspect(lines, at_most=_FRESH)
        if look.is_debugged:
            logger.info("workers that are silent are being debugged")
            self._reset_silence()
            return None
        if (spoke := self._spoke(lines, sights)).issuperset(ranks):
            logger.info("workers that were silent went on while they were asked for their stacks")
            return None
        lately = max(sights[rank].own for rank in ranks) / 2
        spoke |= {rank for rank, sight in sights.items() if sight.own < lately and rank not in ranks}
        witnesses = {rank: look.witness(rank, goes_on=rank in spoke) for rank in workers.pids}
        numbers, began, groups = workers.ranks.items(), time.monotonic(), None
        if workers.sees_all:
            caught = [look.caught(rank, number, self._host, goes_on=rank in spoke) for rank, number in numbers]
            groups = grouped(caught, workers.world_size)
        elif self._exchange is not None:
            found = self._ask_others(self._exchange, max(sights[rank].silent for rank in ranks), lately)
            self._looked = time.monotonic()
            if found.occupied:
                self._reset_silence()
            if found.occupied or not (is_late or found.all_idle):
                return None
            groups = found.groups
            if self._spoke(lines, sights).issuperset(ranks):
                logger.info("workers that were silent went on while those of other nodes were asked for their stacks")
                return None
        blamed, reason = blamed_here(witnesses, workers.ranks, groups, sees_all=workers.sees_all)
        return Hang(blamed, reason, sights, witnesses, look, groups, time.monotonic() - began)

    def _spoke(self, before: Lines, sights: Mapping[int, Observation]) -> set[int]:
        """The ranks that have reported since."""
        now = self._lines(self._workers)
        return {rank for rank in sights if now.get(rank, NOTHING).beat > before.get(rank, NOTHING).beat}

    # --- other nodes

    def _ask_others(self, exchange: StackExchange, silent: float, lately: float) -> Collected:
        """The groups of all ranks of the job; without them if the first node gives no answer."""
        try:
            found = exchange.collect(self._host, silent, lately)
        except (FastckptError, OSError) as error:
            logger.warning("the stacks of other nodes are not known, as the first node gives no answer: %s", error)
            return Collected(None)
        if found.occupied:
            logger.info(
                "workers are silent, but those on %s may hold them up in good health", ", ".join(found.occupied)
            )
        return found

    def _report(self) -> NodeReport:
        """The report on the workers of this node for the first one; called in any thread."""
        workers, seen = self._workers, self._seen
        if not workers.pids:
            raise ProtocolError("this node has no workers yet")
        # How long they are silent is as of the question: the look takes seconds in which nobody may do anything.
        lines, now = self._lines(workers), time.monotonic()
        look = workers.inspect(lines, at_most=KEPT)
        is_occupied = look.is_debugged or (self._is_recent(seen, now) and seen.is_occupied)
        ranks = []
        for rank, number in workers.ranks.items():
            line, sight = lines.get(rank), seen.sights.get(rank)
            waited = sight.waited if sight is not None and sight.takes_steps else 0.0
            silent = now - max(line.beat / 1e9, self._awake) - waited if line else math.inf
            ranks.append((look.caught(rank, number, self._host), silent))
        age, is_idle = now - workers.started, self._is_idle()
        return NodeReport(self._host, age, is_occupied, is_idle, workers.world_size, ranks)

    def _is_recent(self, seen: _Seen, now: float) -> bool:
        """Whether the main thread looks at these workers, rather than waits for others."""
        return seen.workers is self._workers and now - seen.at < 2 * self.interval + 1.0

    def _is_idle(self) -> bool:
        """Whether no worker of this node has done anything for longer than it would in a healthy job; in any thread."""
        seen, found = self._seen, {rank: line.beat for rank, line in self._lines(self._workers).items()}
        has_reported = max(found.values(), default=0) > seen.at * 1e9
        # The main thread looks each second, unless it is collecting stacks itself.
        is_recent = seen.workers is self._workers and time.monotonic() - seen.at < _HANDLING
        return seen.is_idle and is_recent and not has_reported

    def _take_note(self, host: str, groups: StackGroups) -> None:
        hang_record.log_found_elsewhere(host, groups, self._workers)
