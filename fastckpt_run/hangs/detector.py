"""Detection of workers that hang: log which and where, and kill the culprit, which is then handled as any death."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker

from fastckpt._core import metrics
from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.stacks import Stacks, ask
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.hangs import Observation, Witness, culprits, hung, limits, occupied
from fastckpt_run.failures.deaths import peek
from fastckpt_run.hangs.process_activity import Activity, processor_times, state_of
from fastckpt_run.hangs.step_times import Lines, StepTimes, Waits
from fastckpt_run.workers import kill_group

logger = logging.getLogger("fastckpt.launcher")

_STACKS_TIMEOUT = 5.0
"""Seconds that all workers have to write their stacks."""
_DEATH_TIMEOUT = 5.0
"""Seconds in which a culprit that was killed is dead, unless the kernel does not let it."""
_REMEMBERED = 86400.0
"""Seconds for which a hang is remembered, in case it was none."""
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py")
"""Functions in which ranks wait for each other; autograd waits for the gradients of others."""
_DEBUGGERS = ('/bdb.py", line', "/pydevd", "/IPython/terminal/")
"""Parts of the stacks of processes at a prompt of pdb or the like, or under another debugger written in Python."""
_GLANCE = 0.25
"""Seconds over which the processor time of workers is measured."""
_BUSY = 0.2
"""Share of a processor from which on a worker computes, though its stack is in a wait."""

_SHORT = 0.25
"""Seconds of silence before /proc is read to see whether a worker runs."""
_NOTHING = Telemetry(pid=-1)
"""Of a worker that has not reported since it was started."""


@dataclass(frozen=True)
class Hang:
    """A hang: the ranks to blame, and the states of all workers of the node, by local rank."""

    culprits: tuple[int, ...]
    reason: str
    sights: Mapping[int, Observation]
    witnesses: Mapping[int, Witness]
    stacks: Mapping[int, Stacks]
    last: Lines


class HangWatch:
    """Reads the telemetry of the workers of this node, and finds those that hang by the limits of ``setting``.

    Args:
        setting: "auto", "off" or seconds.
        read: The last telemetry of each local rank, by checkpoint directory.

    Attributes:
        killed: The pids of workers that were killed because they hung, since they were started last.
    """

    def __init__(self, setting: str, read: Callable[[], Mapping[str, Sequence[Telemetry]]]) -> None:
        self._setting = setting
        self._read = read
        self._pids: Mapping[int, int] = {}
        self._processes: Mapping[int, Process] = {}
        self._ranks: Mapping[int, int] = {}
        self._sees_all = True
        self._known: set[int] = set()
        self.killed: set[int] = set()
        self._hangs: list[float] = []
        self._step_times = StepTimes()
        self._waits = Waits()
        # Silence counts from here on only: before, the whole machine may have been suspended, this process included.
        self._awake = self._looked = self._started = time.monotonic()
        self._activity = Activity((), self._started)

    @property
    def interval(self) -> float:
        """Seconds between two looks, at most."""
        if self._setting == "off":
            return math.inf
        return 1.0 if self._setting == "auto" else min(1.0, float(self._setting) / 10)

    def started(self, pids: Mapping[int, int], workers: Sequence[Worker]) -> None:
        """Watch new workers of this node, whose processes are given by local rank."""
        self.killed.clear()
        self._pids = dict(pids)
        self._processes = {rank: Process.of(pid) for rank, pid in pids.items()}
        self._ranks = {worker.local_rank: worker.global_rank for worker in workers}
        # With several nodes the rank that the others wait for may be on another one.
        self._sees_all = len(pids) == workers[0].world_size
        self._awake = self._looked = self._started = time.monotonic()
        self._activity = Activity(pids.values(), self._started)
        self._waits.begin()
        self._step_times.begin(self._started)

    def end_hang(self, *, may_restart: bool) -> bool:
        """If the job hangs, log the hang and kill the culprits; return whether it did.

        It takes some seconds to collect the workers' stacks.

        Args:
            may_restart: Whether there would be a restart, so that an error can be made good.
        """
        hang = self._look(may_restart=may_restart)
        if hang is not None:
            _log(hang, self._ranks, self._pids)
            self._kill(hang)
        return hang is not None

    def _look(self, *, may_restart: bool) -> Hang | None:
        # 1. telemetry, and whether this process itself was suspended   2. limits, from the slowest recent step   3. who
        # is silent for longer   4. a close look at these
        if self._setting == "off":
            return None
        now = time.monotonic()
        passed = self._notice_pause(now)
        lines = self._lines()
        self._step_times.see(lines)
        self._hangs = [when for when in self._hangs if now - when < _REMEMBERED]
        allowed = limits(
            self._setting,
            self._step_times.slowest(now),
            len(self._hangs),
            start=self._step_times.start,
            sees_all=self._sees_all,
            may_restart=may_restart,
        )
        sights = self._observations(now, lines)
        if occupied(list(sights.values()), allowed):
            self._waits.advance(passed)
        idle = self._idle(now, lines) if math.isfinite(allowed.idle) else 0.0
        ranks = hung(list(sights.values()), allowed, idle)
        return self._inspect(lines, sights, ranks) if ranks else None

    def _kill(self, hang: Hang) -> None:
        """Kill the culprits; all workers, if none of those can be killed."""
        # Counted before the kill: under "auto" each alarm doubles the limits, in case this one was false.
        self._hangs.append(time.monotonic())
        self._reset_silence()
        for ranks in (hang.culprits, self._pids):
            running = [self._pids[rank] for rank in ranks if self._processes[rank].is_alive()]
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

    def _lines(self) -> dict[int, Telemetry]:
        """The last telemetry of each worker since its start; that of an open checkpointer has priority."""
        found: dict[int, Telemetry] = {}
        for directory in self._read().values():
            for rank, line in enumerate(directory):
                if line.beat > self._started * 1e9 and rank in self._pids:
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
        for rank in self._known & self._pids.keys():
            line = lines.get(rank, _NOTHING)
            silent, waited = now - max(line.beat / 1e9, self._awake), self._waits.of(rank, line.beat)
            if silent < _SHORT or self._runs(rank, line.pid):
                found[rank] = Observation(rank, silent, line.steps, line.phase, line.allowed / 1e9, waited)
        return found

    def _runs(self, rank: int, speaker: int) -> bool:
        """Return whether a worker runs, or, if it is a script, the child of it that sends its heartbeats."""
        return self._processes[rank].is_alive() and (speaker <= 0 or bool(state_of(speaker)))

    def _inspect(self, lines: Lines, sights: Mapping[int, Observation], ranks: Sequence[int]) -> Hang | None:
        """Inspect workers closely when ``ranks`` seem to hang; None if they do not after all."""
        # 1. no debugger is attached   2. processor time: a rank that computes does not wait for others
        # 3. stacks, by a signal   4. telemetry again: workers may have gone on meanwhile   5. the culprits
        speakers = {rank: max(lines.get(rank, _NOTHING).pid, 0) or pid for rank, pid in self._pids.items()}
        states = {rank: state_of(pid) if self._runs(rank, pid) else "" for rank, pid in speakers.items()}
        if "t" in states.values():
            self._reset_silence()
            return None  # a debugger traces it
        before = processor_times(self._pids.values())
        time.sleep(_GLANCE)
        after = processor_times(self._pids.values())
        running = [rank for rank, state in states.items() if state != "T"]  # a stopped process handles no signal
        # A handler in C writes the stacks, so a worker that never returns to Python's interpreter loop answers, too.
        stacks = ask({r: (speakers[r], lines.get(r, _NOTHING).stacks) for r in running}, _STACKS_TIMEOUT)
        if any(debugger in each.text for each in stacks.values() for debugger in _DEBUGGERS):
            logger.info("workers that are silent are being debugged")
            self._reset_silence()
            return None
        now = self._lines()
        spoke = {rank for rank in sights if now.get(rank, _NOTHING).beat > lines.get(rank, _NOTHING).beat}
        if spoke.issuperset(ranks):
            logger.info("workers that were silent went on while they were asked for their stacks")
            return None
        lately = max(sights[rank].own for rank in ranks) / 2
        spoke |= {rank for rank, sight in sights.items() if sight.own < lately and rank not in ranks}
        witnesses = {}
        for rank, pid in self._pids.items():
            line, stack = lines.get(rank, _NOTHING), stacks.get(rank, Stacks())
            # A stack in a collective with processor time is a rank that computes for it, or that has just come there.
            waits = _waits(stack) and after[pid] - before[pid] < _BUSY * _GLANCE
            has_left, place = not (line.pid and states[rank]), str(stack.innermost or "")
            witnesses[rank] = Witness(rank, line.steps, states[rank], rank in spoke, has_left, waits, place)
        blamed, reason = culprits(list(witnesses.values()), sees_all=self._sees_all)
        return Hang(tuple(each.rank for each in blamed), reason, sights, witnesses, stacks, lines)


def _waits(stacks: Stacks) -> bool:
    """Return whether a worker's main thread is in a function in which ranks wait for each other."""
    return stacks.innermost is not None and any(part in stacks.innermost.file for part in _WAITS)


def _log(hang: Hang, ranks: Mapping[int, int], pids: Mapping[int, int]) -> None:
    """Log a hang, with the stacks of all workers, and record it; ``ranks`` are those in the job, by local rank."""
    blamed = " and ".join(_name(ranks[rank], hang.witnesses[rank]) for rank in hang.culprits)
    silent = max(sight.silent for sight in hang.sights.values())
    logger.error("the job hangs, for %.1f s: %s %s; killing", silent, blamed, hang.reason)
    found = []
    for rank, witness in sorted(hang.witnesses.items()):
        last, sight = hang.last.get(rank, Telemetry()), hang.sights.get(rank)
        entry: dict[str, Any] = {"rank": ranks[rank], "local_rank": rank, "worker_pid": pids[rank]}
        entry |= {
            "silent": sight.silent if sight else None,
            "step": last.step,
            "steps": last.steps,
            "phase": last.phase,
        }
        found.append(entry | {"state": witness.state, "place": witness.place})
        text = hang.stacks.get(rank, Stacks()).text.rstrip() or "its stacks cannot be had"
        process = f"local rank {rank}, pid {pids[rank]}, state {witness.state or 'exited'}"
        silence = f"silent for {sight.silent:.1f} s in {last.phase or 'a step'}" if sight else "without a checkpointer"
        logger.error("rank %d (%s) after %d steps, %s:\n%s", ranks[rank], process, witness.steps, silence, text)
    metrics.event("hang", culprits=[ranks[r] for r in hang.culprits], reason=hang.reason, silent=silent, ranks=found)


def _name(rank: int, witness: Witness) -> str:
    return f"rank {rank}" + (f", in {witness.place}," if witness.place else "")
