"""A job of several nodes on this host: agents with memory of their own, which meet as torchrun's do."""

import os
import signal
from pathlib import Path

from tests.faults.jobs import HERE, Job, launcher_for
from tests.support.ports import free_port


class Nodes:
    """One agent for each node, all in one folder. What the ranks did is told by `job`.

    Attributes:
        disks: Of nodes that do not share the checkpoint directory, the directory that is mounted in its place.
    """

    def __init__(self, folder: Path) -> None:
        """Two nodes, of a rank each."""
        self.job = Job(folder)
        self.job.output = folder / "output-0"
        self.agents = [Job(folder), Job(folder)]
        for node, agent in enumerate(self.agents):
            agent.output, agent.faults = folder / f"output-{node}", self.job.faults
        self.disks: dict[int, Path] = {}
        self._endpoint = f"127.0.0.1:{free_port()}"

    def start(self, *script: str, **options: str) -> None:
        """Start the agents."""
        for node, agent in enumerate(self.agents):
            self.shm(node).mkdir(mode=0o700, exist_ok=True)
            shape = ("--nnodes", str(len(self.agents)), "--nproc-per-node", "1", "--max-restarts", "20")
            meeting = ("--rdzv-id", "j", "--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint)
            # Ranks of nodes go by their addresses.
            place = ("--local-addr", f"127.0.0.{node + 1}", "--rdzv-conf", f"is_host={int(node == 0)}")
            launcher = (*launcher_for(self.job.folder), *shape, *meeting, *place)
            if disk := self.disks.get(node):
                launcher = (str(HERE / "own_disk.py"), str(disk), str(self.job.checkpoint_dir), *launcher)
            own = {"FASTCKPT_SHM_DIR": str(self.shm(node)), "FAULTS_LAUNCH": "1", "FAULTS_PAUSE": "0.1"}
            agent.start(*script, launcher=launcher, **(own | options))

    def shm(self, node: int) -> Path:
        """Where a node has its memory."""
        return Path(os.environ["FASTCKPT_SHM_DIR"]) / f"node-{node}"

    def wait(self) -> list[int]:
        """The exit codes of all agents."""
        return [agent.wait() for agent in self.agents]

    def run(self, *script: str, **options: str) -> None:
        """Start, and wait for the good end of all."""
        self.start(*script, **options)
        assert self.wait() == [0] * len(self.agents), self.text()

    def wait_for_death(self, node: int) -> None:
        """Wait until the agent of a node was killed."""
        assert self.agents[node].wait() == -signal.SIGKILL, self.text()

    def text(self) -> str:
        """What all agents and workers have printed."""
        return "\n".join(agent.text() for agent in self.agents if agent.output.exists())

    def resumes(self) -> list[tuple[tuple[int, str], ...]]:
        """Of each start, step and tier of each rank."""
        return list(zip(self.job.resumes(0), self.job.resumes(1), strict=True))

    def end(self) -> None:
        """Clean up, also after a test that failed."""
        for agent in self.agents:
            agent.end()
        for node in range(len(self.agents)):
            self.shm(node).rmdir() if self.shm(node).exists() else None
