"""Rendezvous without torch's detours: workers find each other at the first attempt, however often they start."""

from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from fastckpt_run.torchrun_patches import forget_last_round
from tests.e2e.launcher.conftest import FORK, Jobs, program
from tests.support.ports import free_port

RESTARTS = 2
"""Of which rank 0 is the cause of one, and rank 1 of the other."""


def test_rendezvous_rounds_complete_at_the_first_attempt(jobs: Jobs) -> None:
    """In a process of its own: nothing else ends the sockets of torch's stores."""
    assert jobs.run(launcher=Path(program("rendezvous.py")).read_text()).stdout == "as it should be\n"


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_each_start_forms_its_group_at_the_first_attempt_by_each_init_method(jobs: Jobs, backend: str) -> None:
    port = free_port()
    where = ["--standalone"] if backend == "c10d" else ["--master-addr=localhost", f"--master-port={port}"]
    method = "env://" if backend == "c10d" else f"tcp://localhost:{port}"
    limit = f"--max-restarts={RESTARTS}"  # none to spare for an attempt that fails
    jobs.launch(*where, *FORK, "--nproc-per-node=2", limit, program("restart.py"), str(RESTARTS), method)
    met = {tuple(map(int, line.split())) for line in (jobs.folder / "log").read_text().splitlines()}
    assert met == {(attempt, rank) for attempt in range(RESTARTS + 1) for rank in (0, 1)}
    assert [(event["rank"], event["exitcode"]) for event in jobs.told("worker_died")] == [(0, -9), (1, -9)]
    started = jobs.told("workers_started")
    assert [event["restart_count"] for event in started] == list(range(RESTARTS + 1))
    assert backend == "c10d" or {event["master_port"] for event in started} == {port}


def test_a_static_store_is_cleared_for_one_node_only() -> None:
    for nodes in (1, 2):
        handler = StaticTCPRendezvous("localhost", 0, 0, nodes, "run", 10)
        forget_last_round(handler)  # nothing yet
        handler._store = TCPStore("localhost", 0, None, True)
        handler._store.set("left/over", "by the dead")
        forget_last_round(handler)
        assert bool(handler._store.list_keys()) == (nodes == 2)
