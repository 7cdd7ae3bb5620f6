"""Workers of a node that are silent under "auto": reported at once, and killed only when that cannot be sound."""

import logging
import signal
import time

import pytest
from torch.distributed.elastic.agent.server.api import Worker

from fastckpt._core.memory.telemetry import TelemetryBlock, telemetry_name, unlink
from fastckpt._core.policy import hangs
from fastckpt_run.hangs import process_activity
from fastckpt_run.hangs.detector import HangWatch
from tests.unit.fastckpt_run.hangs.agents import COMPUTES, EXITS, LOOPS, PRINTS, SLEEPS, SPINS, WAITS, CaughtWorker

TOLD = 0.5
LONG, SHORT = 3600, 1
"""Limits of process groups in seconds: half of one is never reached here, half of the other soon."""


class SilentNode:
    """A node whose workers have done some steps, and do nothing more that they report."""

    def __init__(self, folder, *programs: str, patience: int) -> None:
        self.programs, self.patience = programs, patience
        self.block = TelemetryBlock(telemetry_name(folder / "arena"), len(programs))
        self.lines = [self.block.line(rank) for rank in range(len(programs))]
        ranks = range(len(programs))
        self.watch = HangWatch("auto", lambda: {"run": [self.block.read(rank) for rank in ranks]})
        self.workers: list[CaughtWorker] = []
        self.start()

    def start(self, step: int = 7) -> None:
        self.end_workers()
        self.workers = [CaughtWorker(program) for program in self.programs]
        pids = {rank: worker.pid for rank, worker in enumerate(self.workers)}
        world = len(pids)
        self.watch.started(pids, [Worker(rank, global_rank=rank, world_size=world) for rank in pids])
        for line, worker in zip(self.lines, self.workers, strict=True):
            line.begin(0, worker.pid, worker.stacks)
            line.wait_at_most(self.patience * 10**9)
        for _ in range(3):
            for line in self.lines:
                line.step()
                line.at(step)
            assert not self.watch.end_hang(may_restart=True)

    def kills_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.watch.end_hang(may_restart=True):
                return True
            time.sleep(0.05)
        return False

    def spares(self, events, why: str) -> None:
        """Wait until it has been reported why workers are not killed."""
        end = time.monotonic() + 60
        while not any(why in event["spared"] for event in told(events)):
            assert not self.kills_within(0.2) and time.monotonic() < end

    def killed(self) -> list[int]:
        return [rank for rank, worker in enumerate(self.workers) if worker.pid in self.watch.killed]

    def end_workers(self) -> None:
        for worker in self.workers:
            worker.end()


@pytest.fixture
def silent(tmp_path, monkeypatch):
    """Start a node, with half a second for a minute."""
    monkeypatch.setattr(hangs, "IDLE", TOLD)
    monkeypatch.setattr(process_activity, "_WINDOW", 0.1)
    nodes = list[SilentNode]()
    yield lambda *programs, patience: nodes.append(SilentNode(tmp_path, *programs, patience=patience)) or nodes[-1]
    for node in nodes:
        node.end_workers()
        node.block.close()
        unlink(node.block.name)


def told(events, name: str = "hang_spared") -> list:
    return [event for event in events if event["event"] == name]


def test_ranks_that_wait_are_reported_and_left_alone_until_they_go_on(silent, events, caplog):
    node = silent(WAITS, SLEEPS, patience=LONG)
    with caplog.at_level(logging.WARNING, "fastckpt.launcher"):
        assert not node.kills_within(7 * TOLD)
        for line in node.lines:
            line.step()
        assert not node.watch.end_hang(may_restart=True)
    found = told(events)
    assert 2 <= len(found) <= 3, "again when that has lasted twice as long"
    assert all(event["culprits"] == [1] and "they have 1800 s" in event["spared"] for event in found)
    assert "is not where the others wait for it; they have 1800 s, as they may wait in good health" in caplog.text
    assert " in train" in caplog.text, "the stacks"
    assert "the workers go on, after" in caplog.text
    assert node.killed() == []


def test_a_rank_that_others_wait_for_is_killed_at_half_of_what_the_process_group_allows(silent, events):
    """Others that spin in a collective, as over NCCL."""
    node = silent(SPINS, SPINS, SLEEPS, patience=2 * SHORT)
    assert node.kills_within(60)
    assert node.killed() == [2] and told(events, "hang")[0]["silent"] > SHORT
    assert all(event["culprits"] == [2] for event in told(events))
    assert node.workers[2]._process.wait(10) == -signal.SIGKILL


def test_a_start_is_not_killed_where_the_one_before_was_unless_it_came_further(silent, events):
    node = silent(WAITS, SLEEPS, patience=SHORT)
    assert node.kills_within(60)
    node.start()
    node.spares(events, "not killed again")
    assert not node.kills_within(SHORT)
    node.start(step=8)
    assert node.kills_within(60), "that is another hang"


def test_ranks_that_wait_for_one_that_has_exited_are_killed_at_once(silent, events):
    node = silent(WAITS, EXITS, WAITS, patience=LONG)
    assert node.kills_within(60)
    assert told(events, "hang")[0]["silent"] < 60 and not told(events)


def test_ranks_that_compute_are_not_killed_as_others_may_wait_for_them_over_nccl(silent, events):
    node = silent(SPINS, SPINS, LOOPS, patience=2 * SHORT)  # a look at their stacks takes half a second
    node.spares(events, "not killed, as these compute")
    assert not node.kills_within(SHORT)
    assert all(event["culprits"] == [2] for event in told(events))


@pytest.mark.parametrize("odd", [COMPUTES, LOOPS], ids=["its stacks change", "it gives no stack"])
def test_a_rank_that_may_go_on_is_not_taken_for_one_that_is_still(silent, events, odd):
    node = silent(SPINS, odd, patience=SHORT)
    if odd is LOOPS:
        node.lines[1].begin(0, node.workers[1].pid, 0)
        node.lines[1].step()
    assert not node.kills_within(2 * SHORT) and not told(events)


def test_a_rank_that_writes_what_nobody_reads_does_not_hang(silent, events, caplog):
    node = silent(WAITS, PRINTS, patience=1)
    with caplog.at_level(logging.WARNING, "fastckpt.launcher"):
        assert not node.kills_within(5 * TOLD)
    assert caplog.text.count("rank 1 waits: nobody reads its output (pipe:[") == 1
    assert not told(events) and node.killed() == []
