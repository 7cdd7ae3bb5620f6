"""The state of one node now: its workers, its checkpoints, and the cost of a loss; as JSON."""

import math
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.telemetry import PARTS, StepWindow, Telemetry
from fastckpt._core.saver.server import Saver
from fastckpt._core.saver.stats import SaverStats
from fastckpt_run.hangs.process_activity import state_of
from fastckpt_run.watch.unsaved_work import UnsavedWork, reached, unsaved_work

if TYPE_CHECKING:
    from fastckpt_run.watch.watcher import WatchedWorkers

Json = dict[str, Any]

STATUS = "status"
"""Request among agents for the result of `NodeStatus.read`."""


class NodeStatus:
    """Reports the state of this node; called in any thread.

    Args:
        saver: Has the telemetry of the workers, and the state of their checkpoints.
        workers: The workers of the node now.
    """

    def __init__(self, saver: Saver, workers: Callable[[], "WatchedWorkers"]) -> None:
        self._saver, self._workers = saver, workers

    def read(self) -> Json:
        """The state now. Instants are durations until now, in seconds: other nodes have other clocks."""
        now, watched = time.monotonic(), self._workers()
        telemetry, stats, windows = self._saver.telemetry(), self._saver.report(), self._saver.windows()
        since = watched.since / 1e9
        return {
            "host": socket.gethostname(),
            "workers": [
                _worker(watched, rank, telemetry, now) | _own(windows, rank, telemetry) for rank in sorted(watched.pids)
            ],
            "logged": {
                str(rank): {"step": step, "values": {name: _number(value) for name, value in values.items()}}
                for rank, (step, values) in sorted(self._saver.logged().items())
            },
            "tiers": [
                _tiers(each, cost, now)
                for each, cost in zip(stats, unsaved_work(stats, telemetry, now, since), strict=True)
            ],
        }


def _worker(watched: "WatchedWorkers", local_rank: int, telemetry: dict[str, list[Telemetry]], now: float) -> Json:
    own = [ranks[local_rank] for ranks in telemetry.values() if local_rank < len(ranks)]
    # A worker with several checkpointers reports to each: the newest report is the truest.
    last = max((one for one in own if one.beat > watched.since), key=lambda one: one.beat, default=None)
    pid = watched.pids[local_rank]
    found = {"rank": watched.ranks.get(local_rank, -1), "local_rank": local_rank, "pid": pid}
    if last is None:
        return found | {"doing": "starts" if state_of(pid) else "has ended", "step": None, "steps": 0, "silent": None}
    return found | {
        "doing": _doing(last, pid),
        "step": reached(last),
        "steps": last.steps,
        "silent": max(0.0, now - last.beat / 1e9),
        "restarts": last.generation,
    }


def _own(windows: dict[str, list[list[StepWindow]]], local_rank: int, telemetry: dict[str, list[Telemetry]]) -> Json:
    """Seconds of each part of a step in the newest window of a worker, or since its start; empty if not measured."""
    newest = [ranks[local_rank][-1] for ranks in windows.values() if local_rank < len(ranks) and ranks[local_rank]]
    if newest:
        return {"own": {name: spent / 1e9 for name, spent in zip(PARTS, newest[0].parts, strict=True)}}
    for ranks in telemetry.values():
        last = ranks[local_rank] if local_rank < len(ranks) else Telemetry()
        if last.steps and any(last.parts):
            return {"own": {name: spent / 1e9 / last.steps for name, spent in zip(PARTS, last.parts, strict=True)}}
    return {"own": {}}


def _number(value: float) -> float | str:
    """A number as JSON has it: without NaN and infinity."""
    return value if math.isfinite(value) else str(value)


def _doing(last: Telemetry, pid: int) -> str:
    if not state_of(pid):
        return "has ended"
    if last.phase:
        return last.phase
    return "takes steps" if last.steps else "sets up"


def _tiers(stats: SaverStats, cost: UnsavedWork, now: float) -> Json:
    remote = stats.remote
    return {
        "directory": stats.directory,
        "memory": _named(stats.memory, stats, now),
        "storage": _named(stats.durable, stats, now),
        "remote": _named(remote.newest, stats, now) | {"location": remote.location} if remote else None,
        "wanted": stats.lacking.step if stats.lacking else None,
        "saves": stats.saves,
        "skipped": stats.skips.total(),
        "trouble": stats.last_failure if stats.failures else "",
        "loss": {
            name: part and asdict(part) | {"save": list(part.save) if part.save else None}
            for name, part in (("worker", cost.worker), ("node", cost.node), ("storage", cost.storage))
        },
    }


def _named(save: SaveId | None, stats: SaverStats, now: float) -> Json:
    begun = stats.begun.get(save) if save else None
    return {
        "step": save.step if save else None,
        "history": save.history if save else None,
        "age": None if begun is None else max(0.0, now - begun),
    }
