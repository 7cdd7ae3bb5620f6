"""Metrics of the job as one agent sees it: from events, the telemetry of its workers, and the saver's counts."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.telemetry import PARTS, Telemetry
from fastckpt._core.report.goodput import USEFUL
from fastckpt._core.report.goodput_meter import GoodputMeter, LaunchTime
from fastckpt._core.report.launches import ACCOUNTED
from fastckpt._core.report.metric_table import LABEL_VALUES, Labels, Scope
from fastckpt._core.saver.server import Saver
from fastckpt._core.saver.stats import SaverStats
from fastckpt_run.watch.metric_values import MetricValues
from fastckpt_run.watch.step_counts import StepCounts

SHARE = 0.001
"""The part of a core that measuring goodput may take: a look that took long is not repeated soon."""
_COUNTED = ("hang", "flush_done", "bad_checkpoint", "workers_started")
_OF_RESTARTS = ("restarted", "gave_up", "restarts_given_back", "straggler")
_OBSERVED = frozenset({*ACCOUNTED, *_COUNTED, *_OF_RESTARTS})


class JobMetrics:
    """Metrics of the job, without those of its hosts.

    Events may come in any thread; all other methods are called by one thread at a time.

    Args:
        saver: Has the telemetry and the counts.
        ranks: The ranks of this node's workers in the job, by local rank.

    Attributes:
        step: The step that the furthest worker of this node had completed at the last `collect`, as the script numbers
            its saves.
    """

    def __init__(self, saver: Saver, ranks: Callable[[], dict[int, int]]) -> None:
        self._saver, self._ranks = saver, ranks
        self._events: deque[dict[str, Any]] = deque()
        self._meter = GoodputMeter()
        self._steps = StepCounts()
        self._time = LaunchTime({}, 0)
        self._due, self._is_new = 0.0, False
        self.step = self._reached = 0
        self._seen: Counter[str] = Counter()
        self._stragglers: Counter[Labels] = Counter()
        self._slow: dict[str, tuple[str, float]] = {}
        self._workers = self._node = self._nodes = self._world_size = 0
        self._restarts_left: int | None = None
        self._base: dict[str, tuple[SaveId, str]] = {}
        self._most: dict[str, dict[Labels, float]] = {}

    def observe(self, event: dict[str, Any]) -> None:
        """Take an event of this process, in the thread in which it happens."""
        if event["event"] in _OBSERVED:
            self._events.append(event)
        if event["event"] == "workers_stopped":  # before others overwrite how far these came
            self._steps.look(self._saver.telemetry())

    @property
    def is_first(self) -> bool:
        """True for node 0, which gives the values of the whole job."""
        return self._node == 0

    @property
    def restarts(self) -> int:
        """Starts of workers after the first one, as of the last `collect`."""
        return max(0, self._seen["workers_started"] - 1)

    def collect(self, outcome: str = "") -> MetricValues:
        """All values now; with an outcome, the launch ends with it."""
        now = time.monotonic()
        self.take_events()
        changed, self._is_new = self._is_new, False
        if changed or outcome or now >= self._due:
            self._time = self._meter.measure(time.monotonic_ns(), outcome)
            self._due = now + (time.monotonic() - now) / SHARE
        telemetry = self._saver.telemetry()
        self._steps.look(telemetry)
        last = telemetry.get(self._meter.directory, [])
        unit = self._time.steps.unit
        self.step = max(map(unit.number, last), default=0)
        self._reached = max(map(unit.reached, last), default=0)
        found = MetricValues()
        found.only = None if self.is_first else Scope.NODE
        self._add_job(found)
        self._add_ranks(found, last)
        self._add_saves(found, self._saver.report())
        self._add_tiers(found)
        self._add_logged(found)
        return found

    def take_events(self) -> None:
        """Reduce the events since the last call to values for the next `collect`, which take less memory."""
        while self._events:
            event = self._events.popleft()
            self._meter.follow(event)
            name = event["event"]
            if name in _COUNTED:
                self._seen[name] += 1
            if isinstance(left := event.get("restarts_left"), int):
                self._restarts_left = left
            self._note(name, event)
            self._note_load(name, event)
            self._is_new |= name in ("workers_stopped", "workers_started", "job_ended")

    def _note(self, name: str, event: dict[str, Any]) -> None:
        match name:
            case "job_started":
                self._restarts_left = event["max_restarts"]
            case "rendezvous":
                self._node, self._nodes = event["node"], event["nodes"]
                self._world_size = event["world_size"]
            case "workers_started":
                self._workers = len(event["pids"])
            case "worker_died":
                self._workers = max(0, self._workers - 1)
            case "workers_stopped" | "workers_finished":
                self._workers, self._slow = 0, {}
            case "straggler":
                self._note_straggler(str(event["rank"]), str(event["part"]), event)

    def _note_straggler(self, rank: str, part: str, event: dict[str, Any]) -> None:
        if event["slow"]:
            self._stragglers[rank, part] += 1
            self._slow[rank] = part, event["cost"]
        else:
            self._slow.pop(rank, None)

    def _note_load(self, name: str, event: dict[str, Any]) -> None:
        if name == "resumed":
            self._base[event["directory"]] = SaveId(event["history"], event["step"]), event["tier"]
        elif name == "started_fresh":
            self._base.pop(event["directory"], None)

    def _add_job(self, found: MetricValues) -> None:
        spent = self._time
        found.add("step_seconds", self._steps.histogram)
        if spent.goodput is not None:
            found.add("goodput_ratio", spent.goodput)
        found.add("useful_seconds_total", self._never_less("useful", spent.by_cause.get(USEFUL, 0) / 1e9))
        for cause in LABEL_VALUES["cause"]:
            found.add("lost_seconds_total", self._never_less("lost", spent.by_cause.get(cause, 0) / 1e9, cause), cause)
        found.add("steps_total", self._never_less("steps", spent.steps.new))
        found.add("repeated_steps_total", self._never_less("repeated", spent.steps.repeated))
        found.add("step", self.step)
        found.add("workers", self._workers)
        found.add("ranks", self._world_size)
        found.add("nodes", self._nodes)
        found.add("restarts_total", self.restarts)
        if self._restarts_left is not None:
            found.add("restarts_left", self._restarts_left)
        for kind in LABEL_VALUES["kind"]:
            found.add("failures_total", self._never_less("failures", spent.failures.get(kind, 0), kind), kind)
        found.add("hangs_total", self._seen["hang"])
        for labels, count in self._stragglers.items():
            found.add("stragglers_total", count, *labels)
        for rank, (part, cost) in self._slow.items():
            found.add("straggler_cost_ratio", cost, rank, part)
        found.add("events_lost_total", metrics.counts["events_lost"])

    def _never_less(self, name: str, value: float, *labels: str) -> float:
        """A counter that is measured again each time: an estimate that is corrected must not look like a restart."""
        most = self._most.setdefault(name, {})
        most[labels] = max(value, most.get(labels, 0))
        return most[labels]

    def _add_ranks(self, found: MetricValues, last: list[Telemetry]) -> None:
        ranks, unit, now = self._ranks(), self._time.steps.unit, time.monotonic_ns()
        for local_rank, each in enumerate(last):
            rank = str(ranks.get(local_rank, ""))
            if not rank or not each.beat:
                continue
            if each.pid:  # else it has nothing to report any more
                found.add("rank_silent_seconds", max(0, now - each.beat) / 1e9, rank)
            found.add("rank_step", unit.number(each), rank)
            for part, seconds in zip(PARTS, self._steps.parts(local_rank), strict=False):
                found.add("rank_step_seconds", seconds, rank, part)

    def _add_saves(self, found: MetricValues, stats: list[SaverStats]) -> None:
        found.add("saves_total", sum(each.saves for each in stats))
        found.add("saved_bytes_total", sum(each.saved_size for each in stats))
        skips = sum((each.skip_kinds.copy() for each in stats), Counter[str]())
        for reason, count in skips.items():
            found.add("skipped_saves_total", count, reason)
        found.add("overtaken_saves_total", sum(each.overtaken for each in stats))
        found.add("persists_total", sum(each.persisted for each in stats))
        found.add("persisted_bytes_total", sum(each.size for each in stats))
        found.add("persist_seconds_total", sum(each.seconds for each in stats))
        found.add("persist_failures_total", sum(each.failures for each in stats))
        found.add("flushes_total", self._seen["flush_done"])
        remotes = [each.remote for each in stats if each.remote]
        found.add("uploads_total", sum(each.uploaded for each in remotes))
        found.add("uploaded_bytes_total", sum(each.size for each in remotes))
        found.add("upload_failures_total", sum(each.failures for each in remotes))
        found.add("replicated_saves_total", sum(each.replicas.saves for each in stats))
        found.add("replicated_bytes_total", sum(each.replicas.size for each in stats))
        found.add("skipped_replicas_total", sum(each.replicas.skipped for each in stats))
        for tier, count in sum((each.resumes.copy() for each in stats), Counter[str]()).items():
            found.add("resumes_total", count, tier)
        found.add("bad_checkpoints_total", self._seen["bad_checkpoint"])

    def _add_tiers(self, found: MetricValues) -> None:
        stats = next((each for each in self._saver.report() if each.directory == self._meter.directory), None)
        if stats is None:
            return
        newest, at = dict(self._newest(stats)), 0
        for tier, step in newest.items():
            found.add("newest_step", step, tier)
        # From the safest on: a durable save need not be in memory, too.
        for tier in ("remote", "storage", "memory"):
            at = max(at, newest.get(tier, 0))
            if tier != "remote" or stats.remote:
                found.add("unsaved_steps", max(0, self._reached - self._time.steps.unit.before(at)), tier)
        if stats.replicas.newest:
            found.add("replicated_step", stats.replicas.newest.step)
        if stats.durable and stats.since:
            found.add("durable_age_seconds", time.monotonic() - stats.since)

    def _newest(self, stats: SaverStats) -> Iterator[tuple[str, int]]:
        """The newest step in each tier, of the line of checkpoints on which the job is."""
        base, source = self._base.get(stats.directory, (SaveId(-1, 0), ""))
        remote = stats.remote.newest if stats.remote else None
        saved = stats.saved or (base if source == "memory" else None)
        for tier, save in (("memory", saved), ("storage", stats.durable), ("remote", remote)):
            if save is not None:
                # One of an older history that is further was not resumed: it is of another line.
                yield tier, save.step if save.history > base.history else min(save.step, base.step)

    def _add_logged(self, found: MetricValues) -> None:
        ours = set(self._ranks().values())
        for rank, (step, values) in self._saver.logged().items():
            if rank in ours:
                found.add("user_step", step, str(rank))
                for name, value in values.items():
                    found.add("user", value, name, str(rank))
