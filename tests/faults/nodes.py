"""A job of several nodes on this host: agents with memory of their own, which meet as torchrun's do."""

import os
import signal
from pathlib import Path
from typing import Any

from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import arena_path
from tests.faults.jobs import HERE, Job
from tests.support.ports import free_port


class Nodes:
    """One agent for each node, all in one folder. What the ranks did is told by `job`.

    Attributes:
        disks: Of nodes that do not share the checkpoint directory, the directory that is mounted in its place.
    """

    def __init__(self, folder: Path, count: int = 2, ranks: int = 1) -> None:
        """Nodes of so many ranks each."""
        self.job = Job(folder)
        self.job.output = folder / "output-0"
        self.agents = [Job(folder) for _ in range(count)]
        for node, agent in enumerate(self.agents):
            agent.output, agent.faults = folder / f"output-{node}", self.job.faults
        self._ranks = ranks
        self.disks: dict[int, Path] = {}
        self._endpoint = f"127.0.0.1:{free_port()}"

    def start(self, *script: str, nodes: list[int] | None = None, **options: str) -> None:
        """Start the agents, or those of some nodes again."""
        for node in nodes if nodes is not None else range(len(self.agents)):
            shm = self.shm(node)
            shm.mkdir(mode=0o700, exist_ok=True)
            count = f"{options.pop('least', len(self.agents))}:{len(self.agents)}"
            shape = ("--nnodes", count, "--nproc-per-node", str(self._ranks), "--max-restarts", "20", "--rdzv-id", "j")
            # Ranks of nodes go by their addresses.
            meeting = (
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                self._endpoint,
                "--local-addr",
                f"127.0.0.{node + 1}",
            )
            host = ("--rdzv-conf", f"is_host={int(node == 0)}")
            launcher = (str(HERE / "launch.py"), str(self.job.folder), *shape, *meeting, *host)
            if disk := self.disks.get(node):
                launcher = (str(HERE / "own_disk.py"), str(disk), str(self.job.checkpoint_dir), *launcher)
            environment: dict[str, Any] = {
                "FASTCKPT_SHM_DIR": str(shm),
                "FAULTS_LAUNCH": "1",
                "FAULTS_PAUSE": "0.1",
                **options,
            }
            self.agents[node].start(*script, launcher=launcher, **environment)

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

    def slot(self, node: int, step: int) -> Path:
        """Where a node holds a step in memory."""
        arena = arena_path(str(self.shm(node)), os.path.realpath(self.job.checkpoint_dir), 0)
        found = [slot for slot in arena.glob("slot-*") if (id := slots.read(slot).committed) and id.step == step]
        assert len(found) == 1, found
        return found[0]

    def text(self) -> str:
        """What all agents and workers have printed."""
        return "\n".join(agent.text() for agent in self.agents if agent.output.exists())

    def resumes(self) -> list[tuple[tuple[int, str], ...]]:
        """Of each start, step and tier of each rank."""
        ranks = self._ranks * len(self.agents)
        return list(zip(*(self.job.resumes(rank) for rank in range(ranks)), strict=True))

    def end(self) -> None:
        """Clean up, also after a test that failed."""
        for agent in self.agents:
            agent.end()
        for node in range(len(self.agents)):
            self.shm(node).rmdir() if self.shm(node).exists() else None
