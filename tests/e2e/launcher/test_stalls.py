"""Jobs that fail repeatedly: when they are restarted, and the messages when they are not."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fastckpt._core.config import Settings
from fastckpt._core.memory import headroom
from fastckpt._core.memory.telemetry import TelemetryBlock, telemetry_name, unlink
from fastckpt_run.failures.restarts import Restarts
from tests.e2e.launcher.conftest import FORK, LIGHT, Jobs, program

TRAIN = program("train.py")


def starts(folder: Path) -> list[list[str]]:
    """Of each start how many restarts the worker was told of, and the steps that it did."""
    found: list[list[str]] = []
    path = folder / "log"
    for line in path.read_text().splitlines() if path.exists() else ():
        attempt, what, rest = line.split()
        if what == "begins":
            assert int(attempt) == len(found), "starts are counted, and no number comes twice"
            found.append([])
        found[int(attempt)].append(rest)
    return found


def test_a_step_that_always_fails_ends_the_job(jobs: Jobs, tmp_path: Path) -> None:
    """Bad data at step 57, a save every ten steps: each start trains, and none but the first comes further."""
    job = jobs.launch(*FORK, "--max-restarts=20", TRAIN, "--fail=57", code=1)
    assert [(int(start[1]), int(start[-1])) for start in starts(tmp_path)] == [(1, 56), *[(51, 56)] * 3]
    assert "no restart: the workers failed 3 times in a row before they came further than before" in job.stderr
    for start in (2, 3, 4):
        assert f"  start {start} resumed step 50 and came 6 steps further: worker 0 exit code 1\n" in job.stderr
    assert "ValueError: MARK" in job.stderr.partition("Root Cause")[2]
    (event,) = jobs.told("gave_up")
    assert (event["why"], event["restarts_left"]) == ("stalled", 17)
    assert event["text"] in job.stderr


CANNOT_START = {
    "import": ("import os\nimport nosuch\n", "ModuleNotFoundError: No module named 'nosuch'"),
    "arguments": ("import sys\nsys.exit(2)\nimport fastckpt\n", "exit code 2, as of refused arguments"),
}


@pytest.mark.parametrize(
    ("kind", "streams"),
    [("import", ["--tee=2", "--fast-no-preload"]), ("arguments", [])],
    ids="".join,
)
def test_a_script_that_cannot_start_is_started_once(jobs: Jobs, tmp_path: Path, kind: str, streams: list[str]) -> None:
    script, why = CANNOT_START[kind]
    (tmp_path / "script.py").write_text(script)
    options = ("--max-restarts=5", f"--log-dir={tmp_path / 'logs'}", *streams)
    job = jobs.launch(*options, "script.py", "--no-such-option", code=1, PYTHONPATH=LIGHT)
    assert len(jobs.told("workers_started")) == 1, job.stderr
    assert [event["why"] for event in jobs.told("gave_up")] == ["cannot_start"]
    assert f"no restart: the script cannot start: {why}" in job.stderr
    assert "Root Cause (first observed failure)" in job.stderr


def test_progress_gives_restarts_back(jobs: Jobs, tmp_path: Path) -> None:
    """Two failures in a job that may be restarted once, each after a while of progress: no number comes twice."""
    budget = ["--max-restarts=1", "--fast-restart-budget=1/0.2s", "--fast-summary=full"]
    job = jobs.launch(*FORK, *budget, TRAIN, "--steps=40", "--every=5", "--pace=0.03", "--fail", "11", "21", "99")
    assert [start[0] for start in starts(tmp_path)] == ["1", "1", "2"], "so many restarts are allowed in all"
    given = jobs.told("restarts_given_back")
    assert [(event["restarts"], event["restarts_left"]) for event in given] == [(1, 1)]
    assert re.findall(r"; went on after .* from step (\d+) in memory, ", job.stderr) == ["10", "20"]


class Node:
    """The decisions of an agent whose workers say in shared memory what a test has them say."""

    def __init__(self, block: TelemetryBlock, **settings: Any) -> None:
        self.block, self.line = block, block.line(0)
        spec = WorkerSpec("", 1, Mock(), entrypoint="true", max_restarts=5)
        self.restarts = Restarts(Settings(**settings), spec, lambda: {"d": [block.read(0)]}, lambda pid: "", set())

    def run(self, resumed: int = -1, steps: int = 0) -> None:
        self.restarts.started()
        self.line.begin(0, 1, 0)
        if resumed >= 0:
            self.line.resume(resumed)
        for _ in range(steps):
            self.line.step()

    def fail(self, code: int = 1) -> int:
        """Both workers end, the first by the agent's hand."""
        failures = {rank: ProcessFailure(rank, rank, code, "") for rank in (0, 1)}
        return self.restarts.failed(failures, Mock(stopped={0}, stderrs={1: ""}), 5)


@pytest.fixture
def block() -> Iterator[TelemetryBlock]:
    name = telemetry_name(Path(os.environ["FASTCKPT_SHM_DIR"]) / "arena")
    block = TelemetryBlock(name, 1)
    yield block
    block.close()
    unlink(name)


def test_progress_of_former_workers_does_not_count_for_new_ones(
    block: TelemetryBlock, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(block, max_stalls=1)
    node.run(resumed=3, steps=5)
    assert node.fail() == 0
    node.restarts.started()  # and they die before they say anything
    assert node.fail() == -5
    assert "  start 2 ended before anything was loaded or done: worker 1 exit code 1\n" in caplog.text


def test_a_kill_for_want_of_memory_is_a_failure_of_the_script(
    block: TelemetryBlock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes of this host may be killed for that, too, where the kernel counts them together."""
    monkeypatch.setattr(headroom, "CGROUPS", tmp_path / "none")
    monkeypatch.setattr(headroom, "VMSTAT", tmp_path / "vmstat")
    node = Node(block, max_stalls=2)
    for number in range(2):
        (tmp_path / "vmstat").write_text(f"nr_free_pages 7\noom_kill {number}\n")
        node.run(resumed=3)
        (tmp_path / "vmstat").write_text(f"nr_free_pages 7\noom_kill {number + 1}\n")
        assert node.fail(code=-9) == (0 if number == 0 else -5)


def test_hang_limits_depend_on_whether_a_restart_is_left(block: TelemetryBlock) -> None:
    """If not, nothing can make good that workers were taken for hung in error."""
    node = Node(block, max_stalls=2)
    node.run(steps=5)
    assert (node.restarts.would_restart(1), node.restarts.would_restart(0)) == (True, False)
    node.fail()
    node.run(steps=5)
    assert node.restarts.would_restart(5)
    node.fail()
    node.run(steps=5)
    assert not node.restarts.would_restart(5), "it would stall for the second time"
    node.line.step()
    assert node.restarts.would_restart(5), "progress"
    assert node.fail() == 0
