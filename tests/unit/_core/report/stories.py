"""Events of jobs that never were, for tables and properties: an instant is a number of seconds since the launch."""

import json
from pathlib import Path
from typing import Any

from fastckpt._core.report.events import Log, parsed

WALL, BOOT = 1_700_000_000.0, 5_000.0
"""What the wall clock and the monotonic clock show when the first launch begins."""


class Story:
    """The agent of one node tells; its workers are named by local rank."""

    def __init__(self, ranks: int = 2, *, node: int = 0, pid: int = 10, start: float = 0.0, **clock: Any) -> None:
        self.ranks, self.node, self.pid, self.now = ranks, node, pid, start
        self.step, self.boot = clock.get("step", 0.0), clock.get("boot", f"boot-{node}")
        self.lines: list[bytes] = []
        self._origin = 0
        self.tell("job_started", host=f"host{node}", boot=self.boot, script="train.py", local_world_size=ranks)

    def tell(self, name: str, **fields: Any) -> "Story":
        """An event now; ``step`` is by how much somebody has set the wall clock."""
        clocks = {"time": WALL + self.now + self.step, "monotonic": BOOT + self.now}
        self.lines.append(json.dumps({"event": name, **clocks, "pid": self.pid, **fields}).encode())
        return self

    def at(self, instant: float, name: str, **fields: Any) -> "Story":
        self.now = instant
        return self.tell(name, **fields)

    def starts(self, met: float, started: float, imported: float, joined: float) -> "Story":
        """Workers come to have checkpointers."""
        self.at(met, "rendezvous", seconds=0.1, node=self.node, nodes=1, world_size=self.ranks, ranks=[0, 1])
        self.at(started, "workers_started", pids={str(rank): 100 + rank for rank in range(self.ranks)})
        self.now = joined
        for rank in range(self.ranks):
            who = {"rank": rank, "local_rank": rank, "worker": 100 + rank}
            self.tell("worker_joined", directory="/run", imported=BOOT + imported, **who)
        return self

    def loads(self, instant: float, seconds: float, step: int = -1, tier: str = "memory") -> "Story":
        self.now, self._origin = instant, max(0, step)
        for rank in range(self.ranks):
            told = {"directory": "/run", "rank": rank, "local_rank": rank, "seconds": seconds}
            self.tell("resumed", step=step, history=1, tier=tier, **told) if step >= 0 else self.tell(
                "started_fresh", **told
            )
        return self

    def trains(self, instant: float, steps: int, stalled: float = 0.0, beat: float | None = None) -> "Story":
        """A sample: so many steps since the workers started, the last one at ``beat``."""
        self.now = instant
        said = {"step": self._origin + steps, "steps": steps, "named": steps, "loaded": self._origin or -1}
        said |= {"stalled": stalled, "beat": BOOT + (instant if beat is None else beat), "phase": ""}
        ranks = [{"local_rank": rank, **said} for rank in range(self.ranks)]
        return self.tell("progress", directory="/run", ranks=ranks, saves=steps // 2, saved_bytes=steps * 5)

    def says(self, instant: float, *, directory: str = "/run", **said: Any) -> "Story":
        """A sample of one worker, as it is; what is not given is as of one that did nothing yet."""
        told = {"local_rank": 0, "step": -1, "steps": 0, "named": 0, "loaded": -1, "stalled": 0.0, "phase": ""}
        told |= {"beat": BOOT + said.pop("beat", instant), **said}
        return self.at(instant, "progress", directory=directory, ranks=[told], saves=said.get("step", 0))

    def dies(self, instant: float, rank: int = 1, exitcode: int = -9) -> "Story":
        return self.at(instant, "worker_died", rank=rank, local_rank=rank, worker_pid=100 + rank, exitcode=exitcode)

    def stops(self, instant: float) -> "Story":
        return self.at(instant, "workers_stopped", pids=[100])

    def finishes(self, instant: float, end: float, outcome: str = "succeeded") -> "Story":
        self.at(instant, "workers_finished")
        return self.at(end, "job_ended", outcome=outcome, seconds=end)

    @property
    def log(self) -> Log:
        return parsed(Path("log"), self.lines)
