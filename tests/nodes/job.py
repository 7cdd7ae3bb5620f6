"""A training job on the hosts of a cluster: what is done to it, and what it does then."""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from tests.nodes.hosts import HOSTS, LAUNCHER, Cluster, name_of
from tests.nodes.recovery import Line, Losses, Recovery, recovery
from tests.nodes.reference import PROGRAM, losses_in
from tests.support.json_lines import whole_lines

EVERY = 10
"""Steps from one save in memory to the next: other hosts keep small files of it some tenths of a second later."""
NEVER = "100000"
"""An interval of saves to storage that no run is long enough for."""
SOON = 30.0
"""Seconds for what takes up to 4 on a quiet machine; one that waits for a timeout of torch's takes longer."""
LAST_CALL = ("--rdzv-conf", "last_call_timeout=3")
DEADLINE = 150.0
"""Seconds that are waited for what takes a few."""
LAUNCHERS = {"fastckpt": LAUNCHER, "torchrun": ("-m", "torch.distributed.run")}
PORT = 29400
SHAPE = ("--way", "--width", "--steps", "--batches")
"""Options of the script on which losses depend."""
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
        agents: The newest agent of each host that still has one, and takes part.
        waiting: Agents that wait for a place.
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
        self._launcher = [*LAUNCHERS[launcher], *shape, *meet, *flags]
        self._script = [str(PROGRAM), *places, *saver, *script]
        self.shape = [word for pair in itertools.pairwise(script) if pair[0] in SHAPE for word in pair]
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.waiting: dict[int, subprocess.Popen[bytes]] = {}

    # --- what is done to it: each returns when, by the clock of the logs

    def launch(self, *numbers: int, flags: Collection[str] = (), **environment: str) -> float:
        """Start the agents of these hosts, with flags and an environment that are not those of others."""
        started = time.monotonic()
        for number in numbers:
            command = (*self._launcher, *flags, *self._script)
            output = self.out / f"output.{name_of(number)}"
            self.agents[number] = self.cluster.hosts[number].start(*command, output=output, **environment)
        return started

    def add(self, *numbers: int, **options: Any) -> float:
        """Have fresh hosts come, in the places of lost ones or beside them."""
        for number in numbers:
            self.cluster.add(number)
        return self.launch(*numbers, **options)

    def replace(self, lost: int, fresh: int, **options: Any) -> Recovery:
        """Lose a host, and have another come in its place."""
        at = self.lose(lost)
        self.add(fresh, **options)
        return self.recovered(at)

    def set_aside(self, *numbers: int) -> float:
        """Expect no more of the agents of these hosts than that they wait."""
        self.waiting |= {number: self.agents.pop(number) for number in numbers}
        return time.monotonic()

    def count_on(self, *numbers: int) -> float:
        """Expect that hosts which wait take part."""
        self.agents |= {number: self.waiting.pop(number) for number in numbers}
        return time.monotonic()

    def park(self, *numbers: int) -> None:
        """Start spares."""
        for number in numbers:
            self.launch(number, flags=("--fast-events", str(self.out / f"events.{number}")))
        self.set_aside(*numbers)

    def are_parked(self, *numbers: int) -> None:
        """Wait until spares wait for a place."""
        self.until(lambda: all(self.reported(number, "waits_as_spare") for number in numbers), "the spares wait")

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
        stopped = time.monotonic()
        os.kill(self.agent_pid(number), signal.SIGSTOP)
        return stopped

    def thaw(self, number: int) -> float:
        """Continue an agent that was stopped."""
        continued = time.monotonic()
        os.kill(self.agent_pid(number), signal.SIGCONT)
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

    def finish(self) -> None:
        """Have it do some steps more, and come to its good end."""
        self.do_steps(5)
        self.end()

    # --- what it does

    def lines(self, number: int) -> list[Line]:
        """What the workers of a host have logged."""
        return whole_lines(self.out / f"log.{name_of(number)}")

    def output(self, number: int) -> str:
        """What the agents and workers of a host have printed."""
        path = self.out / f"output.{name_of(number)}"
        return path.read_text(errors="replace") if path.exists() else ""

    def reported(self, number: int, name: str) -> list[Line]:
        """Events of a name in the file of a host's --fast-events."""
        return [line for line in whole_lines(self.out / f"events.{number}") if line["event"] == name]

    def events(self, number: int) -> list[Line]:
        """What the agents of a host have reported into the checkpoint directory."""
        logs = (self.cluster.storage / ".fastckpt" / "events").glob(f"*-{name_of(number)}-*")
        return [line for path in logs for line in whole_lines(path)]

    def starts(self, number: int) -> int:
        """How many workers a host has had."""
        return sum(line["what"] == "started" for line in self.lines(number))

    def steps(self, number: int) -> list[int]:
        return [line["step"] for line in self.lines(number) if line["what"] == "step"]

    def agent_pid(self, number: int) -> int:
        entered = self.agents[number].pid  # of the process that entered the host; the agent is its only child
        return int(Path(f"/proc/{entered}/task/{entered}/children").read_text())

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
            time.sleep(0.02)
        return found

    def do_steps(self, count: int, seconds: float = DEADLINE) -> None:
        """Wait until all hosts that have an agent have done so many steps more."""
        goal = self.reached() + count

        self.until(lambda: all(self._newest_step(number) >= goal for number in self.agents), f"step {goal}", seconds)

    def recovered(self, since: float, seconds: float = DEADLINE) -> Recovery:
        """Wait until workers that were started since train on all hosts that have an agent."""

        def found() -> Recovery | None:
            return recovery(self._logs(), self.agents, since)

        return self.until(found, f"training on nodes {sorted(self.agents)}", seconds)

    def _logs(self) -> dict[int, list[Line]]:
        return {number: lines for number in range(HOSTS) if (lines := self.lines(number))}

    def _newest_step(self, number: int) -> int:
        return max(self.steps(number), default=0)

    def _newest_pid(self, number: int) -> int:
        return int(self.lines(number)[-1]["pid"])
