"""Restarts take no memory for ever: what the agent keeps of those of long ago is sums, and compressed lines."""

import gc
import logging
import sys
from collections.abc import Callable, Iterator

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.report import goodput_meter
from fastckpt._core.saver.server import Saver
from fastckpt_run.events import event_lines
from fastckpt_run.events.recorder import EventRecorder
from fastckpt_run.failures.cause import Cause
from fastckpt_run.failures.restart_notice import RestartNotice
from fastckpt_run.failures.restarts import Restarts
from fastckpt_run.watch.job_metrics import JobMetrics

RESTARTS = 100


@pytest.fixture
def agent(monkeypatch, caplog) -> Iterator[Callable[[int], None]]:
    """A function that restarts the workers once, as far as the agent's records of a job go."""
    monkeypatch.setattr(metrics, "_listeners", [])
    monkeypatch.setattr(goodput_meter, "KEPT", 10)
    monkeypatch.setattr(event_lines, "PACKED", 32)
    caplog.set_level(logging.CRITICAL, "fastckpt")  # else pytest keeps a line for each restart
    saver = Saver(Settings())
    saver.start()
    recorder, job = EventRecorder(saver, keep=False), JobMetrics(saver, lambda: {0: 0})
    spec = WorkerSpec("worker", 1, entrypoint="true", rdzv_handler=None, max_restarts=10**6)
    notice = RestartNotice(spec.max_restarts)
    restarts = Restarts(Settings(), spec, saver.telemetry, lambda pid: "", ())
    for listener in (recorder._record, job.observe, notice.observe):
        metrics.listen(listener)
    place = {"directory": "/run", "rank": 0, "local_rank": 0}

    def restart(number: int) -> None:
        restarts.started()
        metrics.event("rendezvous", seconds=0.1, node=0, nodes=1, world_size=1, ranks=[0])
        metrics.event("workers_started", pids={0: 100 + number}, restart_count=number, world_size=1, master_port=1)
        metrics.event("worker_joined", **place, worker=100 + number, imported=0.0)
        metrics.event("resumed", **place, step=number, history=number, tier="memory", seconds=0.1)
        metrics.event("first_step", local_rank=0, rank=0, at=1.0, restart_count=number)
        metrics.event("progress", directory="/run", ranks=[], saves=number)
        metrics.event("worker_died", local_rank=0, rank=0, worker_pid=100 + number, exitcode=-9, restarts_left=9)
        restarts.failed({0: ProcessFailure(0, 100 + number, -9, error_file="")}, None, 10**5)
        notice.failed({0: (-9, Cause())}, 10**5, nodes=1, first="")
        metrics.event("workers_stopped", pids=[100 + number])
        notice.look(10**5)
        job.collect()

    yield restart
    saver.close()


def test_restarts_leave_nothing_behind_in_the_records_of_the_agent(agent):
    counts = []
    for number in range(2 * RESTARTS):
        if number % RESTARTS == 0:
            gc.collect()
            counts.append(sys.getallocatedblocks())
        agent(number)
    gc.collect()
    grown = sys.getallocatedblocks() - counts[-1]
    assert grown < 2 * RESTARTS, f"{grown / RESTARTS:.1f} objects for each restart"
