"""Detection of workers that hang: log which and where, and kill the culprit, which is then handled as any death."""

import logging
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.elastic.agent.server.api import Worker

from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.hangs import Observation, Witness, culprits, hung, limits, occupied
from fastckpt._core.policy.stack_groups import StackGroups, grouped
from fastckpt.errors import FastckptError, ProtocolError
from fastckpt_run.failures.deaths import peek
from fastckpt_run.hangs import hang_record
from fastckpt_run.hangs.hang_record import Hang
from fastckpt_run.hangs.process_activity import Activity
from fastckpt_run.hangs.stack_exchange import NodeReport, StackExchange
from fastckpt_run.hangs.step_times import Lines, StepTimes, Waits
from fastckpt_run.hangs.worker_inspection import KEPT, NOTHING, NodeWorkers
from fastckpt_run.watch.node_channel import NodeChannel
from fastckpt_run.workers import kill_group

logger = logging.getLogger("fastckpt.launcher")

_DEATH_TIMEOUT = 5.0
"""Seconds in which a culprit that was killed is dead, unless the kernel does not let it."""
_REMEMBERED = 86400.0
"""Seconds for which a hang is remembered, in case it was none."""
_FRESH = 2.0
"""Seconds for which stacks that another node has asked for are good enough to judge by."""

_SHORT = 0.25
"""Seconds of silence before /proc is read to see whether a worker runs."""


@dataclass(frozen=True)
class _Seen:
    """The last look at the telemetry, for threads that answer other nodes."""

    workers: NodeWorkers
    at: float = 0.0
    sights: Mapping[int, Observation] = field(default_factory=dict)
    is_occupied: bool = False


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
        self._exchange = StackExchange(channel, self._report, self._take_note) if channel is not None else None
        self._host = socket.gethostname()
        self._workers = NodeWorkers({}, ())
        self._known: set[int] = set()
        self.killed: set[int] = set()
        self._hangs: list[float] = []
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
            sees_all=self._workers.sees_all,
            may_restart=may_restart,
        )
        sights = self._observations(now, lines)
        self._seen = _Seen(self._workers, now, sights, occupied(list(sights.values()), allowed))
        if self._seen.is_occupied:
            self._waits.advance(passed)
        idle = self._idle(now, lines) if math.isfinite(allowed.idle) else 0.0
        ranks = hung(list(sights.values()), allowed, idle)
        return self._inspect(lines, sights, ranks) if ranks else None

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

    def _inspect(self, lines: Lines, sights: Mapping[int, Observation], ranks: Sequence[int]) -> Hang | None:
        """Inspect workers closely when ``ranks`` seem to hang; None if they do not after all."""
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
            groups, waits = self._ask_others(self._exchange, max(sights[rank].silent for rank in ranks), lately)
            if waits:
                self._reset_silence()
                return None
            if self._spoke(lines, sights).issuperset(ranks):
                logger.info("workers that were silent went on while those of other nodes were asked for their stacks")
                return None
        blamed, reason = self._judge(witnesses, groups)
        return Hang(tuple(blamed), reason, sights, witnesses, look, groups, time.monotonic() - began)

    def _spoke(self, before: Lines, sights: Mapping[int, Observation]) -> set[int]:
        """The ranks that have reported since."""
        now = self._lines(self._workers)
        return {rank for rank in sights if now.get(rank, NOTHING).beat > before.get(rank, NOTHING).beat}

    def _judge(self, witnesses: Mapping[int, Witness], groups: StackGroups | None) -> tuple[list[int], str]:
        """The local ranks to kill first, and why: by all ranks of the job if these are known, else by those here."""
        workers = self._workers
        found, reason = culprits(list(witnesses.values()), sees_all=workers.sees_all)
        blamed = [each.rank for each in found]
        if groups is None:
            return blamed, reason
        odd = {number for group in groups.odd for number in group.ranks}
        if here := [rank for rank, number in workers.ranks.items() if number in odd]:
            return here, groups.reason
        if workers.sees_all or not all(each.waits for each in found):
            return blamed, reason
        if groups.odd:
            return blamed, f"waits for {groups.odd[0].name}, which {groups.odd[0].deed}"
        if groups.unheard:
            return blamed, f"waits, perhaps for a rank on {' or '.join(groups.unheard)}, from where no answer came"
        return blamed, "waits, as all others do: which of them is to blame is not known"

    # --- other nodes

    def _ask_others(self, exchange: StackExchange, silent: float, lately: float) -> tuple[StackGroups | None, bool]:
        """The groups of all ranks of the job, as far as they are known, and whether these here may wait for others."""
        try:
            found = exchange.collect(self._host, silent, lately)
        except (FastckptError, OSError) as error:
            logger.warning("the stacks of other nodes are not known, as the first node gives no answer: %s", error)
            return None, False
        if found.occupied:
            logger.info(
                "workers are silent, but those on %s may hold them up in good health", ", ".join(found.occupied)
            )
        return found.groups, bool(found.occupied)

    def _report(self) -> NodeReport:
        """The report on the workers of this node for the first one; called in any thread."""
        workers, seen = self._workers, self._seen
        if not workers.pids:
            raise ProtocolError("this node has no workers yet")
        # How long they are silent is as of the question: the look takes seconds in which nobody may do anything.
        lines, now = self._lines(workers), time.monotonic()
        look = workers.inspect(lines, at_most=KEPT)
        is_recent = seen.workers is workers and now - seen.at < 2 * self.interval + 1.0
        is_occupied = look.is_debugged or (is_recent and seen.is_occupied)
        ranks = []
        for rank, number in workers.ranks.items():
            line, sight = lines.get(rank), seen.sights.get(rank)
            waited = sight.waited if sight is not None and sight.takes_steps else 0.0
            silent = now - max(line.beat / 1e9, self._awake) - waited if line else math.inf
            ranks.append((look.caught(rank, number, self._host), silent))
        return NodeReport(self._host, now - workers.started, is_occupied, workers.world_size, ranks)

    def _take_note(self, host: str, groups: StackGroups) -> None:
        hang_record.log_found_elsewhere(host, groups, self._workers)
