"""Kills of workers while the agent persists a checkpoint, as planned for a run that `fastckpt prove` compares."""

import threading
from pathlib import Path
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.config import proof_folder
from fastckpt._core.memory.processes import Process
from fastckpt._core.policy.planned_kills import PERSIST
from fastckpt._core.report.kill_notes import claim, planned


class PersistKills:
    """Kills a worker of this agent at the begin of a phase of a persist; called in any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._due = {kill: 0 for kill in planned(folder) if kill.kind == PERSIST}
        self._pids: dict[int, int] = {}
        self._ranks: list[int] = []
        self._lock = threading.Lock()

    def happened(self, event: dict[str, Any]) -> None:
        """Keep the workers in mind that an event of this process names."""
        if event["event"] == "rendezvous":
            self._ranks = list(event["ranks"])
        elif event["event"] == "workers_started":
            self._pids = dict(event["pids"])
        elif event["event"] == "workers_stopped":
            self._pids = {}

    def entered(self, phase: str, fields: dict[str, Any]) -> None:
        """A phase begins; it may be one in which a worker is to be killed."""
        if not phase.startswith("persist."):
            return
        with self._lock:
            for kill, seen in list(self._due.items()):
                pid = self._pids.get(self._ranks.index(kill.rank) if kill.rank in self._ranks else -1)
                if pid is None or fields.get("step", -1) < kill.step:
                    continue
                self._due[kill] = seen + 1
                # A child that is not reaped keeps its number: the process that has it is the worker.
                if (
                    seen >= kill.skip
                    and Process.of(pid).is_alive()
                    and claim(self._folder, kill, phase, fields["step"])
                ):
                    del self._due[kill]
                    Process.of(pid).kill()


def begin() -> None:
    """Make the planned kills in this agent, if its job has some."""
    if folder := proof_folder():
        kills = PersistKills(Path(folder))
        metrics.listen(kills.happened)
        metrics.observe(kills.entered)
