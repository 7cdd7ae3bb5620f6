"""Jobs that fail repeatedly: when they are restarted, and the messages when they are not."""

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fastckpt._core.config import Settings
from fastckpt._core.memory import headroom
from fastckpt._core.memory.telemetry import TelemetryBlock, telemetry_name, unlink
from fastckpt_run.failures.restarts import Restarts
from tests.e2e.launcher.conftest import OURS, TORCHRUN, Jobs, program, until
from tests.support.json_lines import whole_lines

TRAIN = program("train.py")
FORK = ["--run-path", "--start-method=fork"]
"""Such workers need not import torch."""


def starts(folder: Path) -> list[list[str]]:
    """Of each start the worker's pid, how many restarts it was told of, and the steps that it did."""
    found: list[list[str]] = []
    path = folder / "log"
    for line in path.read_text().splitlines() if path.exists() else ():
        attempt, what, *rest = line.split()
        if what == "begins":
            assert int(attempt) == len(found), "starts are counted, and no number comes twice"
            found.append(rest)
        else:
            found[int(attempt)] += rest
    return found


def steps(folder: Path) -> list[list[int]]:
    return [[int(step) for step in start[2:]] for start in starts(folder)]


def told(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in whole_lines(folder / "events") if event["event"] == name]


def launch(jobs: Jobs, *arguments: str, **environment: str) -> Any:
    return jobs.run(f"--fast-events={jobs.folder / 'events'}", *arguments, **environment)


def test_a_step_that_always_fails_ends_the_job(jobs: Jobs, tmp_path: Path) -> None:
    """Bad data at step 57, a save every ten steps: each start trains, and none but the first comes further."""
    job = launch(jobs, *FORK, "--max-restarts=20", TRAIN, "--fail=57")
    assert job.returncode == 1
    assert [done[-1] for done in steps(tmp_path)] == [56] * 4
    assert [done[0] for done in steps(tmp_path)] == [1, 51, 51, 51]
    assert "no restart: the workers failed 3 times in a row before they came further than before" in job.stderr
    for start in (2, 3, 4):
        assert f"  start {start} resumed step 50 and came 6 steps further: worker 0 exit code 1\n" in job.stderr
    assert "allow more with --fast-max-stalls" in job.stderr
    assert "ValueError: MARK" in job.stderr.partition("Root Cause")[2]
    (event,) = told(tmp_path, "gave_up")
    assert (event["why"], event["restarts_left"]) == ("stalled", 17)
    assert event["text"] in job.stderr


def test_a_death_before_anything_is_loaded_is_a_stall(jobs: Jobs, tmp_path: Path) -> None:
    job = launch(jobs, *FORK, "--max-restarts=9", "--fast-max-stalls=1", TRAIN, "--fail", "3", "0")
    assert job.returncode == 1
    assert steps(tmp_path) == [[1, 2], []]
    assert "no restart: the workers failed once before they came further" in job.stderr
    assert "  start 2 ended before anything was loaded or done: worker 0 exit code 1\n" in job.stderr


def test_kills_before_any_progress_do_not_end_a_job_that_goes_on_then(jobs: Jobs, tmp_path: Path) -> None:
    """More of them in a row than failures may be: they strike while workers start, or do again what was lost."""
    kills = ["--fail", "13", "0", "12", "0", "11", "0", "99", "--how=kill"]
    job = launch(jobs, *FORK, "--max-restarts=20", TRAIN, "--steps=20", *kills)
    assert job.returncode == 0, job.stderr
    assert [done[-1:] for done in steps(tmp_path)] == [[12], [], [11], [], [], [], [20]]
    assert told(tmp_path, "gave_up") == []


@pytest.mark.parametrize("limit", ["1", pytest.param("0", marks=pytest.mark.campaign)])
def test_failures_at_later_steps_each_time_are_no_stalls(jobs: Jobs, tmp_path: Path, limit: str) -> None:
    """Up to --max-restarts, though no save comes between them; without a limit also those that come no later."""
    fail = ["--fail", "4", "5", "9"] if limit == "1" else ["--fail=3"]
    job = launch(jobs, *FORK, "--max-restarts=2", f"--fast-max-stalls={limit}", TRAIN, *fail)
    assert job.returncode == 1
    assert len(steps(tmp_path)) == 3
    assert [event["why"] for event in told(tmp_path, "gave_up")] == ["spent"]
    assert "no restart: --max-restarts allows 2, and none is left" in job.stderr


CANNOT_START = {
    "import": ("import os\nimport nosuch\n", "ModuleNotFoundError: No module named 'nosuch'"),
    "syntax": ("def f(:\n    pass\n", "SyntaxError: "),
    "argparse": ("import argparse\nargparse.ArgumentParser().parse_args()\nimport fastckpt\n", "script.py: error: "),
}


@pytest.mark.parametrize(
    ("kind", "streams"),
    [
        ("import", ["--tee=2", "--fast-no-preload"]),
        ("import", ["--fast-preload=auto"]),
        ("syntax", ["--fast-no-preload"]),
        ("syntax", ["--fast-preload=auto"]),
        ("argparse", []),
        ("argparse", ["--redirects=2"]),
    ],
    ids="".join,
)
def test_a_script_that_cannot_start_is_started_once(jobs: Jobs, tmp_path: Path, kind: str, streams: list[str]) -> None:
    script, why = CANNOT_START[kind]
    why = "exit code 2, as of refused arguments" if kind == "argparse" and not streams else why
    (tmp_path / "script.py").write_text(script)
    job = launch(jobs, "--max-restarts=5", f"--log-dir={tmp_path / 'logs'}", *streams, "script.py", "--no-such-option")
    assert job.returncode == 1
    assert len(told(tmp_path, "workers_started")) == 1, job.stderr
    (event,) = told(tmp_path, "gave_up")
    assert event["why"] == "cannot_start"
    assert f"no restart: the script cannot start: {why}" in job.stderr
    assert "Root Cause (first observed failure)" in job.stderr


def test_a_lazy_import_that_fails_is_restarted_like_other_failures(jobs: Jobs, tmp_path: Path) -> None:
    job = launch(jobs, *FORK, "--max-restarts=1", TRAIN, "--steps=20", "--fail", "5", "99", "--how=import")
    assert job.returncode == 0, job.stderr
    assert [done[-1] for done in steps(tmp_path)] == [4, 20]
    assert told(tmp_path, "gave_up") == []


@pytest.mark.parametrize("code", [2, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_script_without_a_checkpointer_is_restarted_as_by_torchrun(jobs: Jobs, tmp_path: Path, code: int) -> None:
    (tmp_path / "script.py").write_text(f"print('started', flush=True)\nraise SystemExit({code})\n")
    both = [jobs.start("--max-restarts=3", "script.py", launcher=launcher) for launcher in (OURS, TORCHRUN)]
    printed = [job.communicate(timeout=120)[0] for job in both]
    assert both[0].returncode == both[1].returncode == 1
    assert printed[0].count("started") == printed[1].count("started") == 4


def test_kills_from_outside_are_no_stalls_while_steps_advance(jobs: Jobs, tmp_path: Path) -> None:
    """More in a row than may stall, each at a step drawn by chance beyond all that were done."""
    rng, kills = random.Random(4), 3
    options = [*FORK, "--max-restarts=20", "--fast-max-stalls=1", f"--fast-events={tmp_path / 'events'}"]
    job = jobs.start(*options, TRAIN, "--steps=100000", "--every=7", "--pace=0.002")
    for _ in range(kills):
        # A step more may have been done than was logged.
        target = max(map(max, filter(None, steps(tmp_path))), default=0) + rng.randrange(2, 30)
        until(lambda target=target: target in steps(tmp_path)[-1:][0] if steps(tmp_path) else False, f"step {target}")
        os.kill(int(starts(tmp_path)[-1][0]), signal.SIGKILL)
    (tmp_path / "end").touch()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert len(steps(tmp_path)) == kills + 1
    assert told(tmp_path, "gave_up") == []


def test_a_joining_node_costs_no_restart(jobs: Jobs, tmp_path: Path) -> None:
    """It costs no restart, has a number of its own, and neither counts nor hides the stalls around it."""
    store = TCPStore("localhost", 0, None, True)  # else one agent would have it, and the other could not end alone
    place = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}", "--rdzv-id=7"]
    conf = "--rdzv-conf=join_timeout=60,last_call_timeout=1,is_host=false"
    arguments = [*FORK, *place, conf, "--max-restarts=4", "--fast-max-stalls=1", TRAIN, "--alone"]
    first = jobs.start(f"--fast-events={tmp_path / 'events'}", *arguments, "--pace=0.01", "--fail", "3", "-3", "3")
    mine = tmp_path / "node-0"
    until(lambda: len(starts(mine)) == 2, "the second start")
    other = jobs.start(*arguments, "--pace=0.01", "--steps=100000")
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 1, errors
    assert re.findall(r"start (\d) ", errors) == ["3"]
    started = told(tmp_path, "workers_started")
    assert [(event["restart_count"], event["world_size"]) for event in started] == [(0, 1), (1, 1), (2, 2)]
    assert [event["restarts_left"] for event in told(tmp_path, "worker_died")] == [4, 3]
    other.terminate()
    other.communicate(timeout=60)


def test_progress_gives_restarts_back(jobs: Jobs, tmp_path: Path) -> None:
    """Two failures in a job that may be restarted once, each after a while of progress: no number comes twice."""
    budget = ["--max-restarts=1", "--fast-restart-budget=1/0.2s"]
    failing = ["--steps=40", "--every=5", "--pace=0.03", "--fail", "11", "21", "99"]
    job = launch(jobs, *FORK, *budget, TRAIN, *failing)
    assert job.returncode == 0, job.stderr
    assert [start[1] for start in starts(tmp_path)] == ["1", "1", "2"], "so many restarts are allowed in all"
    given = told(tmp_path, "restarts_given_back")
    assert [(event["restarts"], event["restarts_left"]) for event in given] == [(1, 1)]


class Node:
    """The decisions of an agent whose workers say in shared memory what a test has them say."""

    def __init__(self, block: TelemetryBlock, **settings: Any) -> None:
        self.block, self.line = block, block.line(0)
        spec = WorkerSpec("", 1, Mock(), entrypoint="true", max_restarts=5)
        self.restarts = Restarts(Settings(**settings), spec, lambda: {"d": [block.read(0)]}, lambda pid: "", {7})

    def run(self, resumed: int = -1, steps: int = 0, seconds: float = 0.0) -> None:
        self.restarts.started()
        self.line.begin(0, 1, 0)
        if resumed >= 0:
            self.line.resume(resumed)
        for step in range(steps):
            self.line.step()
            time.sleep(seconds / (steps - 1) if step < steps - 1 else 0.0)

    def fail(self, left: int = 5, pid: int = 1, code: int = 1) -> int:
        """Both workers end, the first by the agent's hand."""
        failures = {rank: ProcessFailure(rank, rank * pid, code, "") for rank in (0, 1)}
        return self.restarts.failed(failures, Mock(stopped={0}, stderrs={1: ""}), left)


@pytest.fixture
def block() -> Iterator[TelemetryBlock]:
    name = telemetry_name(Path(os.environ["FASTCKPT_SHM_DIR"]) / "arena")
    block = TelemetryBlock(name, 1)
    yield block
    block.close()
    unlink(name)


def test_a_restart_that_follows_no_failure_does_not_count(
    block: TelemetryBlock, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(block, max_stalls=2)
    node.run(steps=5)
    assert node.fail() == 0
    for _ in range(5):
        node.run(steps=2)
        node.restarts.interrupted()
    node.run(steps=5)
    assert node.fail() == 0, "the first that came no further"
    node.run(steps=3)
    node.restarts.interrupted()
    node.run(steps=5)
    with caplog.at_level("ERROR", "fastckpt.launcher"):
        assert node.fail() == -5
    assert "start 9 started fresh and came 5 steps further: worker 1 exit code 1\n" in caplog.text


def test_progress_of_former_workers_does_not_count_for_new_ones(block: TelemetryBlock) -> None:
    node = Node(block, max_stalls=1)
    node.run(resumed=3, steps=5)
    assert node.fail() == 0
    node.restarts.started()  # and they die before they say anything
    assert node.fail() == -5


def test_ten_kills_from_outside_count_as_one_failure(block: TelemetryBlock, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(block, max_stalls=2)
    for _ in range(19):
        node.run(resumed=3)
        assert node.fail(code=-9) == 0
    with caplog.at_level("ERROR", "fastckpt.launcher"):
        node.run(resumed=3)
        assert node.fail(code=-9) == -5
    assert "the workers failed 20 times in a row before they came further" in caplog.text
    assert re.findall(r"^  (.* before|start \d+)", caplog.text, re.M) == ["15 starts before", *_starts(16, 20)]


def _starts(first: int, last: int) -> list[str]:
    return [f"start {number}" for number in range(first, last + 1)]


def test_progress_between_kills_begins_the_count_again(block: TelemetryBlock) -> None:
    node = Node(block, max_stalls=1)
    for step in range(1, 12):
        node.run(resumed=step, steps=1)
        for _ in range(9):
            assert node.fail(code=-9) == 0
            node.run(resumed=step)
        node.run(resumed=step, steps=2)
        assert node.fail(code=-9) == 0


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


def test_a_stall_by_hangs_is_reported_as_hangs(block: TelemetryBlock, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(block, max_stalls=1)
    node.run(resumed=3)
    with caplog.at_level("ERROR", "fastckpt.launcher"):
        assert node.fail(pid=7, code=-9) == -5
    assert "start 1 resumed step 3 and came no step further: worker 1 hung\n" in caplog.text


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


def test_repeated_steps_give_no_restart_back(block: TelemetryBlock) -> None:
    node = Node(block, restart_budget="1/0.05s")
    node.run(steps=5, seconds=0.06)
    assert node.fail(left=5) == 0
    node.run(steps=5, seconds=0.06)
    node.restarts.interrupted()
    node.run(steps=5, seconds=0.06)
    assert node.fail(left=4) == 0
    node.run(steps=6, seconds=0.06)
    assert node.fail(left=4) == 1
