"""Detection of workers that hang: log which and where; workers that cannot be sound are killed, as any death."""

import logging
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.elastic.agent.server.api import Worker

from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.hangs import IDLE, Limits, Observation, hung, limits, occupied
from fastckpt._core.policy.stack_groups import StackGroups, blamed_here, grouped
from fastckpt.errors import FastckptError, ProtocolError
from fastckpt_run.hangs import hang_record
from fastckpt_run.hangs.hang_record import Hang
from fastckpt_run.hangs.silences import Silences
from fastckpt_run.hangs.stack_exchange import Collected, NodeReport, StackExchange
from fastckpt_run.hangs.step_times import Lines, StepTimes
from fastckpt_run.hangs.worker_inspection import KEPT, NodeWorkers
from fastckpt_run.watch.node_channel import NodeChannel

logger = logging.getLogger("fastckpt.launcher")

_REMEMBERED = 86400.0
"""Seconds for which a hang is remembered, in case it was none."""
_FRESH = 2.0
"""Seconds for which stacks that another node has asked for are good enough to judge by."""

_HANDLING = 15.0
"""Seconds for which the main thread does not look because it collects stacks, at most."""
_ASK_AGAIN = 10.0
"""Seconds after which other nodes are asked again whether nobody there does anything."""


@dataclass(frozen=True)
class _Seen:
    """The last look at the telemetry, for threads that answer other nodes."""

    workers: NodeWorkers
    at: float = 0.0
    sights: Mapping[int, Observation] = field(default_factory=dict)
    is_occupied: bool = False
    idle: float = 0.0


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
        self._exchange: StackExchange | None = None
        if channel is not None:
            self._exchange = StackExchange(channel, self._report, self._idle_here, self._take_note)
        self._host = socket.gethostname()
        self._workers = NodeWorkers({}, (), read)
        self.killed: set[int] = set()
        self._hangs: list[float] = []
        self._in_vain, self._steps_were_seen = 0, False
        self._unread: dict[int, int] = {}
        self._asked_idle = 0.0
        self._silences = Silences()
        self._step_times = StepTimes()
        self._looked = self._workers.started
        self._seen = _Seen(self._workers)

    @property
    def interval(self) -> float:
        """Seconds between two looks, at most."""
        if self._setting == "off":
            return math.inf
        return 1.0 if self._setting == "auto" else min(1.0, float(self._setting) / 10)

    def started(self, pids: Mapping[int, int], workers: Sequence[Worker]) -> None:
        """Watch new workers of this node; their processes are given by local rank."""
        now = time.monotonic()
        was_vain = bool(self._workers.pids) and not self._has_begun
        # Workers without telemetry may have done steps; not in so short a time.
        is_vain = was_vain and (self._steps_were_seen or now - self._workers.started < IDLE)
        self._steps_were_seen = self._steps_were_seen or self._has_begun
        self._in_vain = self._in_vain + 1 if is_vain else 0
        self.killed.clear()
        self._workers = NodeWorkers(pids, workers, self._workers.read, self._workers.known)
        self._looked = self._workers.started
        self._seen = _Seen(self._workers)
        self._silences.begin()
        self._step_times.begin(self._looked)

    @property
    def is_due(self) -> bool:
        """True if it is time for another look.

        The caller, which waits for deaths, wakes up more often.
        """
        return time.monotonic() - self._looked >= 0.9 * self.interval

    @property
    def _has_begun(self) -> bool:
        """True if a worker of this node has done a step since it was started."""
        return any(line.steps > 0 for line in self._workers.lines().values())

    @property
    def is_told(self) -> bool:
        """True if it was reported that the workers do not go on."""
        return self._silences.told > 0.0

    @property
    def is_stuck(self) -> bool:
        """True if the workers that end did not go on, as was reported, or came to no step, like those before them."""
        return self.is_told or bool(self.killed) or (self._in_vain > 0 and not self._has_begun)

    def end_hang(self, *, may_restart: bool) -> bool:
        """Log a hang; if it cannot be sound, kill the culprits, and return whether they were.

        It takes some seconds to collect the workers' stacks, and those of other nodes.

        Args:
            may_restart: True if there would be a restart, so that an error can be made good.
        """
        hang = self._look(may_restart=may_restart)
        if hang is None:
            return False
        hang_record.log(hang, self._workers)
        self._looked = time.monotonic()  # a close look is no pause of this process
        if not hang.spared:
            # Counted before the kill: under "auto" each alarm doubles the limits, in case this one was false.
            self._hangs.append(time.monotonic())
            self._reset_silence()
            self.killed |= self._workers.kill(hang.culprits)
        return not hang.spared

    def _look(self, *, may_restart: bool) -> Hang | None:
        # 1. telemetry, and whether this process itself was suspended   2. limits, from the slowest recent step   3. who
        # is silent for longer   4. a close look at these
        if self._setting == "off":
            return None
        now, workers = time.monotonic(), self._workers
        passed = self._notice_pause(now)
        lines = workers.lines()
        self._step_times.see(lines)
        self._notice_progress(lines)
        self._hangs = [when for when in self._hangs if now - when < _REMEMBERED]
        allowed = limits(
            self._setting,
            self._step_times.slowest(now),
            len(self._hangs),
            start=self._step_times.start,
            patience=max([line.patience / 1e9 for line in lines.values()], default=0.0),
            sees_all=workers.sees_all or self._exchange is not None,
            may_restart=may_restart,
        )
        sights = workers.observations(now, lines)
        if is_occupied := occupied(list(sights.values()), allowed):
            workers.waits.advance(passed)
        idle = workers.idle(now, lines, allowed.told, may_look=not is_occupied) if math.isfinite(allowed.told) else 0.0
        self._looked = time.monotonic()  # a look at their stacks is no pause of this process
        ranks = hung(list(sights.values()), replace(allowed, idle=allowed.told), idle)
        # Found by the other limits, or by the one on idleness alone, which with several nodes has to hold for all.
        is_late = bool(hung(list(sights.values()), replace(allowed, idle=math.inf), idle))
        self._seen = _Seen(workers, now, sights, is_occupied, idle if ranks or not sights else 0.0)
        silent = max([sights[rank].silent for rank in ranks], default=0.0)
        beyond = 2 if is_late else int(idle > allowed.idle)
        if not ranks or not self._silences.is_due(silent, beyond):
            return None
        if not is_late and not workers.sees_all:
            idle = min(idle, self._idle_elsewhere(now))
        if not is_late and idle <= allowed.told:
            return None
        hang = self._inspect(lines, sights, ranks, idle=math.inf if is_late else idle, allowed=allowed)
        if hang is not None:
            self._silences.note(silent, hang.places, lines.values(), beyond if hang.spared else 0)
        return hang

    def _idle_elsewhere(self, now: float) -> float:
        """Seconds for which nobody on any node has done anything; 0, too, if they were asked a moment ago."""
        if self._exchange is None or now - self._asked_idle < _ASK_AGAIN:
            return 0.0
        self._asked_idle = now
        idle = self._exchange.idle()
        self._looked = time.monotonic()  # the wait for an answer is no pause of this process
        return idle

    def _notice_pause(self, now: float) -> float:
        """Seconds since the last look; too many mean that this process was suspended."""
        passed, self._looked = now - self._looked, now
        # A suspended machine, or an agent that was stopped: the workers' silence meanwhile is no sign of a hang.
        if passed > 2 * self.interval + 1.0:
            self._reset_silence()
        return passed

    def _reset_silence(self) -> None:
        """Silence so far does not count."""
        self._workers.forgive()
        self._silences.end()

    def _notice_progress(self, lines: Lines) -> None:
        """Note that workers go on after a report of their silence."""
        spoken = max([line.beat / 1e9 for line in lines.values()], default=0.0)
        if self._silences.told and spoken > self._silences.at:
            logger.warning(
                "the workers go on, after %.0f s of silence", self._silences.told + spoken - self._silences.at
            )
            self._silences.gone_on()

    def _inspect(
        self, lines: Lines, sights: Mapping[int, Observation], ranks: Sequence[int], *, idle: float, allowed: Limits
    ) -> Hang | None:
        """Inspect workers closely when ``ranks`` seem to hang; None if they do not after all.

        They hang only if nobody on any node does anything; unless one is late, which is an infinite ``idle``.
        """
        # 1. a close look: debuggers, processor time, stacks   2. telemetry again: workers may have gone on meanwhile
        # 3. the stacks of other nodes   4. telemetry again   5. the culprits
        workers = self._workers
        look = workers.inspect(lines, at_most=_FRESH)
        if look.is_external:
            hang_record.log_external(look, workers, self._unread)
            self._unread = {rank: line.beat for rank, line in lines.items() if rank in look.unread}
            self._reset_silence()
            return None
        if (spoke := workers.spoke(lines, sights)).issuperset(ranks):
            logger.info("silent workers went on while their stacks were collected")
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
            if found.occupied or (math.isfinite(idle) and found.idle <= allowed.told):
                return None
            idle, groups = idle if math.isinf(idle) else min(idle, found.idle), found.groups
            if workers.spoke(lines, sights).issuperset(ranks):
                logger.info("silent workers went on while the stacks of other nodes were collected")
                return None
        blamed, reason = blamed_here(witnesses, workers.ranks, groups, sees_all=workers.sees_all)
        hang = Hang(blamed, reason, sights, witnesses, look, groups, time.monotonic() - began)
        return replace(hang, spared=self._why_spared(hang, idle, allowed))

    def _why_spared(self, hang: Hang, idle: float, allowed: Limits) -> str:
        """Return why workers that hang are not killed, since the wait may be sound; empty if it cannot be."""
        lines = hang.look.lines.values()
        is_for_good = hang.groups is not None and hang.groups.is_for_good and any(line.patience for line in lines)
        if self._setting != "auto" or is_for_good:
            return ""
        if idle <= allowed.idle:
            return f"they have {allowed.idle:.0f} s, as they may wait in good health"
        if math.isinf(idle):
            return ""
        if self._silences.is_again(hang.places, lines):
            return "not killed again, as those before them were when they hung there"
        if hang.idle <= allowed.idle:  # a rank that spins, as over NCCL, looks like one that computes
            return "not killed, as these compute, or wait over NCCL: torch's own limit ends that"
        return ""

    # --- other nodes

    def _ask_others(self, exchange: StackExchange, silent: float, lately: float) -> Collected:
        """The groups of all ranks of the job; without them if the first node gives no answer."""
        try:
            found = exchange.collect(self._host, silent, lately)
        except (FastckptError, OSError) as error:
            logger.warning("cannot get the stacks of other nodes from the first node: %s", error)
            return Collected(None)
        if found.occupied:
            logger.info("workers are silent, but may wait for workers on %s, which are busy", ", ".join(found.occupied))
        return found

    def _report(self) -> NodeReport:
        """The report on the workers of this node for the first one; called in any thread."""
        workers, seen = self._workers, self._seen
        if not workers.pids:
            raise ProtocolError("this node has no workers yet")
        # How long they are silent is as of the question: the look takes seconds in which nobody may do anything.
        lines, now = workers.lines(), time.monotonic()
        look = workers.inspect(lines, at_most=KEPT)
        looks = seen.workers is self._workers and now - seen.at < 2 * self.interval + 1.0  # or it waits for others
        is_occupied = look.is_external or (looks and seen.is_occupied)
        ranks = []
        for rank, number in workers.ranks.items():
            line, sight = lines.get(rank), seen.sights.get(rank)
            waited = sight.waited if sight is not None and sight.takes_steps else 0.0
            silent = now - max(line.beat / 1e9, workers.awake) - waited if line else math.inf
            ranks.append((look.caught(rank, number, self._host), silent))
        return NodeReport(self._host, now - workers.started, is_occupied, self._idle_here(), workers.world_size, ranks)

    def _idle_here(self) -> float:
        """Seconds for which no worker of this node has done anything; called in any thread."""
        seen, workers, found = self._seen, self._workers, self._workers.lines()
        if workers.pids and not any(map(workers.is_alive, workers.pids)):
            return time.monotonic() - workers.started  # the main thread may wait for other nodes to end
        has_reported = any(line.beat > seen.at * 1e9 for line in found.values())
        # The main thread looks each second, unless it is collecting stacks itself.
        is_recent = seen.workers is self._workers and time.monotonic() - seen.at < _HANDLING
        return seen.idle if is_recent and not has_reported else 0.0

    def _take_note(self, host: str, groups: StackGroups) -> None:
        hang_record.log_found_elsewhere(host, groups, self._workers)
        if (seen := self._seen).workers is self._workers and seen.idle:
            silent = max([sight.silent for sight in seen.sights.values()], default=0.0)
            self._silences.note(silent, groups.places, self._workers.lines().values())
