"""Metrics of a job from events, telemetry and the saver's counts: tables of what was seen and what is shown."""

import time
from types import SimpleNamespace
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.policy.slots import Skip, SkipKind
from fastckpt._core.saver.stats import SaverStats
from fastckpt_run.watch.job_metrics import JobMetrics
from tests.support.tables import for_each

RUN = "/run"


class Watched:
    """A job of two local ranks that are ranks 4 and 5, on the node ``node``, with a saver that reports ``stats``."""

    def __init__(self, node: int = 0, **stats: Any) -> None:
        self.stats = SaverStats(RUN, **stats)
        self.ranks, self.values = [Telemetry(), Telemetry()], dict[int, tuple[int, dict[str, float]]]()
        saver: Any = SimpleNamespace(
            report=lambda: [self.stats], telemetry=lambda: {RUN: self.ranks}, logged=lambda: self.values
        )
        self.metrics = JobMetrics(saver, lambda: {0: 4, 1: 5})
        self.happens("job_started", max_restarts=3)
        self.happens("rendezvous", node=node, nodes=2, world_size=8)
        self.happens("workers_started", pids={0: 10, 1: 11})
        for rank in (0, 1):
            self.happens("worker_joined", directory=RUN, local_rank=rank)

    def happens(self, name: str, **fields: Any) -> None:
        self.metrics.observe(metrics.stamp(name) | fields)

    def at(self, step: int, *, loaded: int = -1, saved: int = -1, pid: int = 10) -> None:
        """Both ranks have come to a step; the newest that a save has named is ``saved``."""
        base = max(loaded, 0)
        now = time.monotonic_ns()
        last = Telemetry(
            step=max(saved, loaded), loaded=loaded, steps=step - base, named=max(saved - base, 0), beat=now, pid=pid
        )
        self.ranks = [last, last]
        self.metrics.collect()

    def found(self) -> dict[str, float]:
        return {metric.key(labels).removeprefix("fastckpt_"): value for metric, labels, value in self.metrics.collect()}

    def tiers(self, name: str) -> dict[str, float]:
        found = self.found()
        keys = {tier: f'{name}{{tier="{tier}"}}' for tier in ("memory", "storage", "remote")}
        return {tier: found[key] for tier, key in keys.items() if key in found}


ADOPTED, BAD = {"durable": SaveId(1, 20)}, {"saved": SaveId(1, 50), "durable": SaveId(1, 40)}
LOSSES = [
    ({}, -1, "", 12, {}, (12, 12)),
    (ADOPTED, 35, "memory", 36, {"memory": 35, "storage": 20}, (1, 16)),
    (BAD, 40, "storage", 45, {"memory": 40, "storage": 40}, (5, 5)),  # step 50 was in memory
]


@for_each(*LOSSES)
def test_a_loss_costs_the_steps_since_the_newest_checkpoint_that_counts(stats, loaded, tier, step, newest, unsaved):
    job, place = Watched(**stats), {"directory": RUN, "local_rank": 0, "seconds": 0.1}
    if loaded < 0:
        job.happens("started_fresh", **place)
    else:
        job.happens("resumed", **place, history=1, step=loaded, tier=tier)
    job.at(step, loaded=loaded)
    costs = dict(zip(("memory", "storage"), unsaved, strict=True))
    assert (job.tiers("newest_step"), job.tiers("unsaved_steps")) == (newest, costs)


def test_a_node_after_the_first_gives_values_of_its_own_alone():
    job = Watched(saves=5, saved_size=70, failures=2, node=1)
    job.at(12)
    found = job.found()
    assert found["saved_bytes_total"] == 70 and found["persist_failures_total"] == 2 and found["workers"] == 2
    assert not {"saves_total", "steps_total", "step", "nodes", "restarts_total"} & found.keys()
    assert 'rank_step{rank="4"}' in found and 'rank_step{rank="5"}' in found


def test_counts_follow_the_events_and_a_worker_that_has_deregistered_is_not_silent():
    job = Watched()
    job.at(12)
    assert job.found()['rank_silent_seconds{rank="4"}'] >= 0
    job.at(12, pid=0)
    assert 'rank_silent_seconds{rank="4"}' not in job.found() and job.found()['rank_step{rank="4"}'] == 12
    job.at(12)
    job.happens("worker_died", local_rank=1, rank=5, exitcode=-9, restarts_left=3)
    assert job.found()["workers"] == 1
    job.happens("workers_stopped", pids=[10, 11])
    job.happens("hang", culprits=[5], silent=9.0, reason="", ranks=[])
    found = job.found()
    assert found["workers"] == 0 and found['failures_total{kind="died"}'] == 1 and found["hangs_total"] == 1
    job.happens("rendezvous", node=0, nodes=1, world_size=2)
    job.happens("workers_started", pids={0: 12, 1: 13})
    job.happens("worker_failed", restarts_left=2)
    found = job.found()
    assert (found["restarts_total"], found["workers"], found["nodes"], found["ranks"]) == (1, 2, 1, 2)
    assert (found["restarts_left"], found['failures_total{kind="elsewhere"}']) == (2, 0)


def test_kinds_of_skipped_saves_are_labels_and_logged_values_those_of_the_nodes_ranks():
    job = Watched()
    for number in range(50):
        kind = SkipKind.LATE if number % 5 else SkipKind.BUSY
        job.stats.skip(Skip(f"step 7 waits for local rank {number} to save it, too", kind))
    job.values = {4: (7, {"loss": 0.5}), 9: (7, {"loss": 1.0})}  # rank 9 was of an earlier round
    found = job.found()
    reasons = {key: value for key, value in found.items() if key.startswith("skipped_saves_total")}
    assert reasons == {'skipped_saves_total{reason="late"}': 40, 'skipped_saves_total{reason="busy"}': 10}
    logged = {key: value for key, value in found.items() if key.startswith("user")}
    assert logged == {'user{name="loss",rank="4"}': 0.5, 'user_step{rank="4"}': 7}
