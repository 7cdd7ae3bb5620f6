"""A close look at the workers of a node when the job hangs: states, processor time, stacks; shared by all callers."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.elastic.agent.server.api import Worker

from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.stacks import Stacks, ask
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.hangs import Observation, Witness
from fastckpt._core.policy.stack_groups import CaughtRank, Frame, place_of
from fastckpt_run.failures.deaths import peek
from fastckpt_run.hangs.process_activity import Activity, processor_times, state_of, unread_output
from fastckpt_run.hangs.silences import Stillness
from fastckpt_run.hangs.step_times import Lines, Waits
from fastckpt_run.left_processes import kill_group

STACKS_TIMEOUT = 5.0
"""Seconds that all workers have to write their stacks."""
KEPT = 10.0
"""Seconds for which a look is good enough for other nodes, unless a worker has reported since."""
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py")
"""Functions in which ranks wait for each other; autograd waits for the gradients of others."""
_DEBUGGERS = ('/bdb.py", line', "/pydevd", "/IPython/terminal/")
"""Parts of the stacks of processes at a prompt of pdb or the like, or under another debugger written in Python."""
_GLANCE = 0.25
"""Seconds over which the processor time of workers is measured."""
_DEATH_TIMEOUT = 5.0
"""Seconds in which a culprit that was killed is dead, unless the kernel does not let it."""
_SHORT = 0.25
"""Seconds of silence before /proc is read to see whether a worker runs."""
_BUSY = 0.2
"""Share of a processor from which on a worker computes, though its stack is in a wait."""
NOTHING = Telemetry(pid=-1)
"""Telemetry of a worker that has not reported since it was started."""


@dataclass(frozen=True)
class CloseLook:
    """Workers as they were found, by local rank.

    Attributes:
        lines: Their telemetry before they were asked for their stacks.
        states: In the kernel: a letter as in /proc/PID/stat; empty for one that has exited.
        stacks: Of those that could be asked.
        waiting: Ranks in a function in which ranks wait for each other, without computing there.
        idle: For how many seconds each has done nothing.
        is_debugged: True if a debugger is attached to one, or one is at a prompt; then nothing else may be known.
        unread: Ranks that wait to write, each with the file that nobody reads.
    """

    lines: Lines
    states: Mapping[int, str]
    stacks: Mapping[int, Stacks]
    waiting: frozenset[int] = frozenset()
    idle: Mapping[int, float] = field(default_factory=dict)
    is_debugged: bool = False
    unread: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_external(self) -> bool:
        """True if something outside the workers holds them up: a debugger, or nobody reads their output."""
        return self.is_debugged or bool(self.unread)

    def witness(self, rank: int, *, goes_on: bool) -> Witness:
        """Return the facts on a local rank, which ``goes_on`` if it has reported lately."""
        line, stack = self.lines.get(rank, NOTHING), self.stacks.get(rank, Stacks())
        has_left, place = not (line.pid and self.states[rank]), str(stack.innermost or "")
        waits, idle = rank in self.waiting, self.idle.get(rank, 0.0)
        return Witness(rank, line.steps, self.states[rank], goes_on, has_left, waits, place, idle)

    def caught(self, rank: int, number: int, host: str, *, goes_on: bool = False) -> CaughtRank:
        """A local rank, as other nodes know it: by its ``number`` in the job, and its host."""
        stack = self.stacks.get(rank, Stacks())
        witness = replace(self.witness(rank, goes_on=goes_on), rank=number)
        frames = tuple(frame.name for frame in stack.frames)
        return CaughtRank(witness, host, frames, place_of(stack.frames), is_in_collective(stack))


class NodeWorkers:
    """The workers of this node from one start to the next.

    Methods for inspection and telemetry may be called in any thread, the rest in one.

    Args:
        pids: By local rank.
        workers: As torch has them.
        read: The last telemetry of each local rank, by checkpoint directory.
        known: Ranks that had a checkpointer before the start.

    Attributes:
        pids: By local rank; and ``ranks``, those in the job.
        world_size: Number of ranks in the job.
        started: Time of their start, by the monotonic clock.
        awake: Silence counts from then on: before, the machine may have been suspended, this process included.
        waits: For how long each may have waited for others.
        known: Ranks that have a checkpointer, or are to have one soon.
    """

    def __init__(
        self,
        pids: Mapping[int, int],
        workers: Sequence[Worker],
        read: Callable[[], Mapping[str, Sequence[Telemetry]]],
        known: Collection[int] = (),
    ) -> None:
        self.read = read
        self.pids = dict(pids)
        self.ranks = {worker.local_rank: worker.global_rank for worker in workers}
        self.world_size: int = workers[0].world_size if workers else 0
        self.started = self.awake = time.monotonic()
        self.waits, self.known = Waits(), set(known)
        self._activity, self._stillness = Activity(pids.values(), self.started), Stillness()
        self._processes = {rank: Process.of(pid) for rank, pid in pids.items()}
        self._lock = threading.Lock()
        self._last: tuple[float, CloseLook] | None = None

    @property
    def sees_all(self) -> bool:
        """True if these are all ranks of the job.

        With several nodes, the rank that others wait for may be elsewhere.
        """
        return len(self.pids) == self.world_size

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a local rank runs."""
        return self._processes[rank].is_alive()

    def runs(self, rank: int, speaker: int) -> bool:
        """Return whether a worker runs, or, if it is a script, the child of it that sends its heartbeats."""
        return self.is_alive(rank) and (speaker <= 0 or bool(state_of(speaker)))

    def kill(self, culprits: Sequence[int]) -> set[int]:
        """Kill local ranks, or all if those do not die of it; return the pids of running ones."""
        killed: set[int] = set()
        for ranks in (culprits, self.pids):
            running = [self.pids[rank] for rank in ranks if self.is_alive(rank)]
            for pid in running:
                kill_group(pid)
            killed.update(running)
            end = time.monotonic() + _DEATH_TIMEOUT
            while running and time.monotonic() < end:  # one death is enough: torch stops the other workers after it
                # A process in uninterruptible sleep (D) does not die of
                # SIGKILL until the kernel returns: then all are killed.
                if any(peek(pid) is not None for pid in running):
                    return killed
                time.sleep(0.001)
        return killed

    def lines(self) -> dict[int, Telemetry]:
        """The last telemetry of each worker since its start; an open checkpointer's has priority."""
        found: dict[int, Telemetry] = {}
        for directory in self.read().values():
            for rank, line in enumerate(directory):
                if line.beat > self.started * 1e9 and rank in self.pids:
                    found[rank] = max(found.get(rank, line), line, key=lambda line: (line.pid > 0, line.beat))
        return found

    def spoke(self, before: Lines, ranks: Collection[int]) -> set[int]:
        """Return those of ``ranks`` that have reported since."""
        now = self.lines()
        return {rank for rank in ranks if now.get(rank, NOTHING).beat > before.get(rank, NOTHING).beat}

    def forgive(self) -> None:
        """Have silence so far not count."""
        self.awake = time.monotonic()
        self.waits.begin()

    def observations(self, now: float, lines: Lines) -> dict[int, Observation]:
        """All running ranks that have a checkpointer, or had one when they were restarted."""
        # A pid of 0 marks a closed checkpointer; a rank without a line was restarted and has not opened one yet.
        self.known |= {rank for rank, line in lines.items() if line.pid}
        self.known -= {rank for rank, line in lines.items() if not line.pid}
        found = {}
        for rank in self.known & self.pids.keys():
            line = lines.get(rank, NOTHING)
            silent, waited = now - max(line.beat / 1e9, self.awake), self.waits.of(rank, line.beat)
            if silent < _SHORT or self.runs(rank, line.pid):
                found[rank] = Observation(rank, silent, line.steps, line.phase, line.allowed / 1e9, waited)
        return found

    def idle(self, now: float, lines: Lines, allowed: float, *, may_look: bool) -> float:
        """Seconds for which all wait: idle, or at the same places, since those that wait over NCCL spin.

        Args:
            now: By the monotonic clock.
            lines: Their telemetry.
            allowed: Seconds of silence before their stacks are taken.
            may_look: True if these may be taken.
        """
        spoken = max([self.awake, *(line.beat / 1e9 for line in lines.values())]) if lines else now
        idle = self._activity.idle(now, spoken)
        if idle > allowed or not may_look or not lines:
            return idle

        def stacks() -> dict[int, tuple[Frame, ...]]:
            return {rank: found.frames for rank, found in self.inspect(lines, at_most=0.0).stacks.items()}

        return max(idle, self._stillness.seconds(now, now - spoken, allowed, stacks))

    def inspect(self, lines: Lines, *, at_most: float) -> CloseLook:
        """Look at all workers closely; a call during another thread's waits for that, and has the same answer.

        Args:
            lines: Their telemetry.
            at_most: The age in seconds of an earlier look that is good enough, if no worker has reported since.
        """
        with self._lock:
            if self._last is not None and time.monotonic() - self._last[0] < at_most:
                before = {rank: line.beat for rank, line in self._last[1].lines.items()}
                if before == {rank: line.beat for rank, line in lines.items()}:
                    return self._last[1]
            found = self._inspect(lines)
            self._last = None if found.is_debugged else (time.monotonic(), found)
            return found

    def _inspect(self, lines: Lines) -> CloseLook:
        # 1. no debugger is attached   2. processor time: a rank that computes does not wait for others
        # 3. stacks, by a signal
        speakers = {rank: max(lines.get(rank, NOTHING).pid, 0) or pid for rank, pid in self.pids.items()}
        states = {rank: state_of(pid) if self.runs(rank, pid) else "" for rank, pid in speakers.items()}
        if "t" in states.values():
            return CloseLook(lines, states, {}, is_debugged=True)
        before = processor_times(self.pids.values())
        time.sleep(_GLANCE)
        after = processor_times(self.pids.values())
        running = [rank for rank, state in states.items() if state != "T"]  # a stopped process handles no signal
        # A handler in C writes the stacks, so a worker that never returns to Python's interpreter loop answers, too.
        stacks = ask({r: (speakers[r], lines.get(r, NOTHING).stacks) for r in running}, STACKS_TIMEOUT)
        debugged = any(debugger in each.text for each in stacks.values() for debugger in _DEBUGGERS)
        # A stack in a collective with processor time is a rank that computes for it, or that has just come there.
        meek = {rank for rank, pid in self.pids.items() if after[pid] - before[pid] < _BUSY * _GLANCE}
        waiting = frozenset(rank for rank in meek if is_in_collective(stacks.get(rank, Stacks())))
        now = time.monotonic()
        idle = {rank: self._activity.idle_of(pid, now) for rank, pid in self.pids.items()}
        unread = {rank: output for rank in running if (output := unread_output(speakers[rank]))}
        return CloseLook(lines, states, stacks, waiting, idle, debugged, unread)


def is_in_collective(stacks: Stacks) -> bool:
    """Return whether a worker's main thread is in a function in which ranks wait for each other."""
    return stacks.innermost is not None and any(part in stacks.innermost.file for part in _WAITS)
