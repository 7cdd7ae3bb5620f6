"""A training job on the hosts of a cluster: what is done to it, and what it does then."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from tests.nodes.hosts import HOSTS, Cluster, name_of
from tests.nodes.recovery import Line, Losses, Recovery, recovery
from tests.nodes.reference import PROGRAM, losses_in
from tests.support.json_lines import whole_lines

DEADLINE = 150.0
"""Seconds that are waited for what takes a few."""
LAUNCHERS = {"fastckpt": "fastckpt_run", "torchrun": "torch.distributed.run"}
PORT = 29400
Found = TypeVar("Found")


class JobEndedError(AssertionError):
    """The agent of a host has ended while more was expected of the job."""


class TooLateError(AssertionError):
    """What was expected of a job has not come true in time."""


def endpoint(*numbers: int) -> str:
    """Where the agents meet: at the first of these hosts that lives."""
    return ",".join(f"{name_of(number)}:{PORT}" for number in numbers)


class NodesJob:
    """A launch of train.py, of one worker on each host.

    Attributes:
        agents: The newest agent of each host that still has one.
    """

    def __init__(
        self,
        cluster: Cluster,
        *script: str,
        nodes: str,
        meeting: str = "",
        launcher: str = "fastckpt",
        flags: Collection[str] = (),
    ) -> None:
        """A job of ``nodes``, as --nnodes has it, that meets at an endpoint: by default, the lowest host."""
        self.cluster, self.out = cluster, cluster.folder
        place = meeting or endpoint(min(cluster.hosts))
        meet = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", place]
        shape = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "20"]
        places = ["--out", str(self.out), "--checkpoint-dir", str(cluster.storage)]
        saver = ["--saver", "fastckpt" if launcher == "fastckpt" else "torch"]
        self._launcher = ["-m", LAUNCHERS[launcher], *shape, *meet, *flags]
        self._script = [str(PROGRAM), *places, *saver, *script]
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    # --- what is done to it: each returns when, by the clock of the logs

    def launch(self, *numbers: int, flags: Collection[str] = (), **environment: str) -> float:
        """Start the agents of these hosts, with flags and an environment that are not those of others."""
        started = time.monotonic()
        for number in numbers:
            command = (*self._launcher, *flags, *self._script)
            output = self.out / f"output.{name_of(number)}"
            self.agents[number] = self.cluster.hosts[number].start(*command, output=output, **environment)
        return started

    def kill_worker(self, number: int) -> float:
        """SIGKILL of a host's worker."""
        pid = self.cluster.hosts[number].pid_outside(self._newest_pid(number))
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return killed

    def kill_node(self, number: int) -> float:
        """SIGKILL of all processes of a host; its memory stays."""
        killed = time.monotonic()
        self.cluster.hosts[number].kill_all()
        self.agents.pop(number).wait(DEADLINE)
        return killed

    def lose(self, number: int) -> float:
        """Lose a host with its memory."""
        lost = time.monotonic()
        self.cluster.lose(number)
        self.agents.pop(number).wait(DEADLINE)
        return lost

    def freeze(self, number: int) -> float:
        """SIGSTOP of a host's agent: not of its workers."""
        entered = self.agents[number].pid  # of the process that entered the host; the agent is its only child
        stopped = time.monotonic()
        os.kill(int(Path(f"/proc/{entered}/task/{entered}/children").read_text()), signal.SIGSTOP)
        return stopped

    def thaw(self, number: int) -> float:
        """Continue an agent that was stopped."""
        continued = time.monotonic()
        self.agents[number].send_signal(signal.SIGCONT)  # nsenter stopped with it, and continues it
        return continued

    def isolate(self, number: int, *, has_carrier: bool) -> float:
        """Cut a host off for good: what becomes of its agent is no longer looked at."""
        cut = time.monotonic()
        host = self.cluster.hosts[number]
        host.mute() if has_carrier else host.unplug()
        self.agents.pop(number)
        return cut

    def end(self) -> None:
        """Have it come to its good end."""
        (self.out / "stop").touch()
        codes = {number: agent.wait(DEADLINE) for number, agent in self.agents.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{self.text()}"

    # --- what it does

    def lines(self, number: int) -> list[Line]:
        """What the workers of a host have logged."""
        return whole_lines(self.out / f"log.{name_of(number)}")

    def reached(self) -> int:
        """The last step that any worker has done."""
        return max(map(self._newest_step, range(HOSTS)))

    def losses(self) -> Losses:
        return losses_in(self.out)

    def text(self, size: int = 3000) -> str:
        """The end of what each agent and its workers have printed."""
        outputs = sorted(self.out.glob("output.*"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-size:]}" for path in outputs)

    def until(self, condition: Callable[[], Found], what: str, seconds: float = DEADLINE) -> Found:
        """Wait for a condition; fails at once if an agent ends meanwhile."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            codes = {number: agent.poll() for number, agent in self.agents.items()}
            if set(codes.values()) != {None}:
                raise JobEndedError(f"{what} did not come true: agents ended {codes}\n{self.text()}")
            if time.monotonic() > end:
                raise TooLateError(f"{what} did not come true in {seconds} s\n{self.text()}")
            time.sleep(0.05)
        return found

    def do_steps(self, count: int, seconds: float = DEADLINE) -> None:
        """Wait until all hosts that have an agent have done so many steps more."""
        goal = self.reached() + count

        self.until(lambda: all(self._newest_step(number) >= goal for number in self.agents), f"step {goal}", seconds)

    def recovered(self, since: float, seconds: float = DEADLINE) -> Recovery:
        """Wait until workers that were started since train on all hosts that have an agent."""

        def found() -> Recovery | None:
            return recovery(self._logs(), self.agents, since)

        result = self.until(found, f"training on nodes {sorted(self.agents)}", seconds)
        assert result is not None
        return result

    def _logs(self) -> dict[int, list[Line]]:
        return {number: lines for number in range(HOSTS) if (lines := self.lines(number))}

    def _newest_step(self, number: int) -> int:
        return max((line["step"] for line in self.lines(number) if line["what"] == "step"), default=0)

    def _newest_pid(self, number: int) -> int:
        return int(self.lines(number)[-1]["pid"])
