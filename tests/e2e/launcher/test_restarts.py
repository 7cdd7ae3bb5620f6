"""Restarted workers find each other at the first attempt, however often."""

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from fastckpt_run.torchrun_patches import forget_last_round
from tests.e2e.launcher.conftest import FORK, Jobs, program
from tests.support.ports import free_port


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "how", "restarts"),
    [
        ("c10d", FORK, 3),
        ("static", FORK, 3),
    ],
)
def test_each_restart_forms_its_group_at_the_first_attempt(
    jobs: Jobs, backend: str, how: tuple[str, ...], restarts: int
) -> None:
    port = free_port()
    where = "--standalone" if backend == "c10d" else f"--master-port={port}"
    limit = f"--max-restarts={restarts}"  # none to spare for an attempt that fails
    jobs.launch(where, *how, "--nproc-per-node=2", limit, program("restart.py"), str(restarts))
    met = {tuple(map(int, line.split())) for line in (jobs.folder / "log").read_text().splitlines()}
    assert met == {(attempt, rank) for attempt in range(restarts + 1) for rank in (0, 1)}
    died = [(event["rank"], event["exitcode"]) for event in jobs.told("worker_died")]
    assert died == [(i % 2, -9) for i in range(restarts)]
    started = jobs.told("workers_started")
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
