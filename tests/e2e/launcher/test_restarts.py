"""Restarted workers find each other at the first attempt, however often."""

import json
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from fastckpt_run.torchrun_patches import forget_last_round
from tests.e2e.launcher.conftest import Jobs, program
from tests.support.ports import free_port

MANY = 20
# Forked workers restart in a third of a second, executed ones import torch each time.
FORK = ["--run-path", "--start-method=fork"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "how", "restarts"),
    [
        pytest.param("c10d", FORK, MANY, id="c10d-forked"),
        pytest.param("static", [], 3, id="static-executed"),
        pytest.param("static", FORK, MANY, id="static-forked", marks=pytest.mark.campaign),
        pytest.param("c10d", [], MANY, id="c10d-executed-often", marks=pytest.mark.campaign),
        pytest.param("static", [], MANY, id="static-executed-often", marks=pytest.mark.campaign),
    ],
)
def test_each_restart_forms_its_group_at_the_first_attempt(
    jobs: Jobs, tmp_path: Path, backend: str, how: list[str], restarts: int
) -> None:
    port = free_port()
    where = ["--standalone"] if backend == "c10d" else [f"--master-port={port}"]
    job = jobs.run(
        *where,
        *how,
        "--nproc-per-node=2",
        f"--max-restarts={restarts}",  # none to spare for an attempt that fails
        f"--fast-events={tmp_path / 'events'}",
        program("restart.py"),
        str(restarts),
    )
    assert job.returncode == 0, job.stderr
    met = {tuple(map(int, line.split())) for line in (tmp_path / "log").read_text().splitlines()}
    assert met == {(attempt, rank) for attempt in range(restarts + 1) for rank in (0, 1)}
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    died = [event for event in events if event["event"] == "worker_died"]
    assert [(event["rank"], event["exitcode"]) for event in died] == [(i % 2, -9) for i in range(restarts)]
    started = [event for event in events if event["event"] == "workers_started"]
    assert [event["restart_count"] for event in started] == list(range(restarts + 1))
    if backend == "static":
        assert {event["master_port"] for event in started} == {port}


def test_a_static_store_is_cleared_for_one_node_only() -> None:
    for nodes in (1, 2):
        handler = StaticTCPRendezvous("localhost", 0, 0, nodes, "run", 10)
        forget_last_round(handler)  # nothing yet
        handler._store = TCPStore("localhost", 0, None, True)
        handler._store.set("left/over", "by the dead")
        forget_last_round(handler)
        assert bool(handler._store.list_keys()) == (nodes == 2)
