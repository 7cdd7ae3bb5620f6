"""A close look at the workers of a node when the job hangs: states, processor time, stacks; shared by all who ask."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.elastic.agent.server.api import Worker

from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.stacks import Stacks, ask
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.hangs import Witness
from fastckpt._core.policy.stack_groups import CaughtRank, place_of
from fastckpt_run.hangs.process_activity import processor_times, state_of
from fastckpt_run.hangs.step_times import Lines

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
_BUSY = 0.2
"""Share of a processor from which on a worker computes, though its stack is in a wait."""
NOTHING = Telemetry(pid=-1)
"""Of a worker that has not reported since it was started."""


@dataclass(frozen=True)
class CloseLook:
    """Workers as they were found, by local rank.

    Attributes:
        lines: Their telemetry before they were asked for their stacks.
        states: In the kernel: a letter as in /proc/PID/stat; empty for one that has exited.
        stacks: Of those that could be asked.
        waiting: Those in a function in which ranks wait for each other, without computing there.
        is_debugged: Whether a debugger is attached to one, or one is at a prompt; then nothing else may be known.
    """

    lines: Lines
    states: Mapping[int, str]
    stacks: Mapping[int, Stacks]
    waiting: frozenset[int] = frozenset()
    is_debugged: bool = False

    def witness(self, rank: int, *, goes_on: bool) -> Witness:
        """What is known of a local rank, which ``goes_on`` if it has reported lately."""
        line, stack = self.lines.get(rank, NOTHING), self.stacks.get(rank, Stacks())
        has_left, place = not (line.pid and self.states[rank]), str(stack.innermost or "")
        return Witness(rank, line.steps, self.states[rank], goes_on, has_left, rank in self.waiting, place)

    def caught(self, rank: int, number: int, host: str, *, goes_on: bool = False) -> CaughtRank:
        """A local rank, as other nodes know it: by its ``number`` in the job, and its host."""
        stack = self.stacks.get(rank, Stacks())
        witness = replace(self.witness(rank, goes_on=goes_on), rank=number)
        frames = tuple(frame.name for frame in stack.frames)
        return CaughtRank(witness, host, frames, place_of(stack.frames), is_in_collective(stack))


class NodeWorkers:
    """The workers of this node from one start to the next; all methods may be called in any thread.

    Attributes:
        pids: By local rank; and ``ranks``, those in the job.
        world_size: How many ranks the job has.
        started: When they were, by the monotonic clock.
    """

    def __init__(self, pids: Mapping[int, int], workers: Sequence[Worker]) -> None:
        self.pids = dict(pids)
        self.ranks = {worker.local_rank: worker.global_rank for worker in workers}
        self.world_size: int = workers[0].world_size if workers else 0
        self.started = time.monotonic()
        self._processes = {rank: Process.of(pid) for rank, pid in pids.items()}
        self._lock = threading.Lock()
        self._last: tuple[float, CloseLook] | None = None

    @property
    def sees_all(self) -> bool:
        """Whether these are all ranks of the job: with several nodes the one that others wait for may be elsewhere."""
        return len(self.pids) == self.world_size

    def is_alive(self, rank: int) -> bool:
        """Whether the process of a local rank runs."""
        return self._processes[rank].is_alive()

    def runs(self, rank: int, speaker: int) -> bool:
        """Return whether a worker runs, or, if it is a script, the child of it that sends its heartbeats."""
        return self.is_alive(rank) and (speaker <= 0 or bool(state_of(speaker)))

    def inspect(self, lines: Lines, *, at_most: float) -> CloseLook:
        """Look at all workers closely; who comes while another thread does waits for it, and has the same answer.

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
        idle = {rank for rank, pid in self.pids.items() if after[pid] - before[pid] < _BUSY * _GLANCE}
        waiting = frozenset(rank for rank in idle if is_in_collective(stacks.get(rank, Stacks())))
        return CloseLook(lines, states, stacks, waiting, debugged)


def is_in_collective(stacks: Stacks) -> bool:
    """Return whether a worker's main thread is in a function in which ranks wait for each other."""
    return stacks.innermost is not None and any(part in stacks.innermost.file for part in _WAITS)
