"""Deaths are noticed when they happen, and no process outlives the job it belongs to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from fastckpt._core.config import Settings
from fastckpt_run.agent import FastckptAgent
from fastckpt_run.failures.deaths import DeathWatch, describe, peek
from fastckpt_run.parent_death import die_with
from fastckpt_run.workers import drop_if_torn
from tests.e2e.launcher.conftest import Jobs, alive, pids_in, program, until
from tests.support.json_lines import whole_lines

FAMILY = program("family.py")
GRACE = 600  # seconds that no test could pass: only SIGKILL at once ends these workers


def events(path: Path) -> list[dict[str, object]]:
    """What is told of the job, not of how its workers are started, nor what was measured."""
    return [event for event in whole_lines(path) if not event["event"].startswith(("preload", "metrics"))]


def ready(folder: Path, count: int) -> bool:
    return len(list(folder.glob("ready.*"))) == count


def wait_all_dead(folder: Path) -> None:
    until(lambda: not any(map(alive, pids_in(folder))), f"the death of {pids_in(folder)}")


@pytest.mark.parametrize("how", [[], ["loader"]], ids=["child", "loader"])
@pytest.mark.parametrize(
    "path",
    [["--fast-no-preload"], ["--fast-preload=math"], ["--run-path", "--start-method=fork"]],
    ids=["exec", "fork", "run-path"],
)
def test_a_killed_worker_ends_all_other_workers_and_their_children(
    jobs: Jobs, tmp_path: Path, how: list[str], path: list[str]
) -> None:
    """Neither deaf workers, nor children of the dead or of the others, live to see the restart."""
    told = tmp_path / "events"
    two = ["--nproc-per-node=2", "--max-restarts=1", f"--shutdown-timeout={GRACE}", "--monitor-interval=5"]
    job = jobs.start(*path, *two, f"--fast-events={told}", FAMILY, *how)
    until(lambda: ready(tmp_path, 2) or job.poll() is not None, "readiness")
    family = pids_in(tmp_path)
    assert len(family) == (6 if how else 4)
    os.kill(int((tmp_path / "ready.1").read_text()), signal.SIGKILL)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert [(tmp_path / f"survivors.{rank}").read_text() for rank in (0, 1)] == ["", ""]
    assert [event["event"] for event in events(told)] == [
        "job_started",
        "rendezvous",
        "workers_started",
        "worker_died",
        "worker_failed",
        "workers_stopped",
        "rendezvous",
        "workers_started",
        "workers_finished",
        "restarted",
        "job_ended",
    ]
    died = events(told)[3]
    assert (died["rank"], died["local_rank"], died["exitcode"]) == (1, 1, -9)


def test_a_worker_that_exits_with_zero_is_no_failure(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run("--nproc-per-node=2", "--max-restarts=1", f"--fast-events={tmp_path / 'e'}", program("touch.py"))
    assert job.returncode == 0
    names = [event["event"] for event in events(tmp_path / "e")]
    assert names == ["job_started", "rendezvous", "workers_started", "workers_finished", "job_ended"]


@pytest.mark.parametrize(
    "path",
    [
        ["--fast-no-preload"],
        ["--fast-preload=math"],
        pytest.param(["--run-path"], marks=pytest.mark.campaign),
        ["--run-path", "--start-method=forkserver"],
    ],
    ids=["exec", "fork", "spawn", "forkserver"],
)
def test_workers_of_a_killed_agent_die(jobs: Jobs, tmp_path: Path, path: list[str]) -> None:
    job = jobs.start(*path, "--nproc-per-node=2", FAMILY)
    until(lambda: ready(tmp_path, 2) or job.poll() is not None, "readiness")
    workers = [int((tmp_path / f"ready.{rank}").read_text()) for rank in (0, 1)]
    assert all(map(alive, workers))
    job.kill()
    until(lambda: not any(map(alive, workers)), "the workers' death")
    for orphan in pids_in(tmp_path) - set(workers):  # what they forked is not the agent's to know
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.usefixtures("started")
def test_sigterm_to_the_agent_lets_workers_clean_up(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start("--nproc-per-node=2", program("end.py"), "wait")
    until(lambda: ready(tmp_path, 2), "readiness")
    job.terminate()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1
    assert errors.splitlines()[-1] == "fastckpt-run: stopped by SIGTERM"
    assert len(list(tmp_path.glob("cleaned.*"))) == 2


@pytest.mark.usefixtures("started")
def test_sigterm_to_the_agent_kills_children_that_workers_leave(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start("--shutdown-timeout=1", FAMILY)
    until(lambda: ready(tmp_path, 1), "readiness")
    job.terminate()
    job.communicate(timeout=60)
    wait_all_dead(tmp_path)


STARTING = """
import os, signal, sys, time
from pathlib import Path
from fastckpt_run import torchrun_patches
from fastckpt_run.main import main

start = torchrun_patches.BoundSubprocessHandler.__init__

def signalled(*arguments, **options):
    start(*arguments, **options)
    while not Path(os.environ["JOB_FOLDER"], "ready.0").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)

torchrun_patches.BoundSubprocessHandler.__init__ = signalled
main(sys.argv[1:])
"""


@pytest.mark.usefixtures("started")
def test_sigterm_while_workers_are_started_leaves_none_and_no_child_of_one(jobs: Jobs, tmp_path: Path) -> None:
    """torch does not know them yet, so it ends none."""
    job = jobs.start("--nproc-per-node=2", FAMILY, launcher=[sys.executable, "-c", STARTING])
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1 and errors.splitlines()[-1] == "fastckpt-run: stopped by SIGTERM", errors
    wait_all_dead(tmp_path)


BEATING = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from fastckpt_run.main import main

class Timer(dynamic_rendezvous._PeriodicTimer):
    def __init__(self, interval, function, handler):
        super().__init__(timedelta(), beat, handler)

def beat(handler):
    hearts.add(handler())
    for _ in range(1000):
        store.set("heart", "beats")

hearts, store = set(), TCPStore("127.0.0.1", 0, is_master=True)
dynamic_rendezvous._PeriodicTimer = Timer
main(sys.argv[1:])
"""


def test_a_rendezvous_heartbeat_at_the_end_aborts_nothing(jobs: Jobs, tmp_path: Path) -> None:
    """torch does not stop it after a signal."""
    job = jobs.start("--nproc-per-node=1", program("end.py"), "wait", launcher=[sys.executable, "-c", BEATING])
    until(lambda: ready(tmp_path, 1), "readiness")
    job.terminate()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1, errors


DRIVER = """
import os, psutil, signal, sys, time
from fastckpt_run import agent
from fastckpt_run.main import main

def note(text):
    with open(os.environ["JOB_FOLDER"] + "/saver", "a") as file:
        file.write(text + "\\n")

class Noting(agent.Saver):
    def start(self):
        note("start")
        super().start()
    def breakpoint(self):
        if all("template.main" in " ".join(child.cmdline()) for child in psutil.Process().children()):
            note("breakpoint, all reaped")
        if "broken" in sys.argv:
            raise OSError("no memory")
        super().breakpoint()
    def flush(self, **how):
        note("flush")
        raise TimeoutError
    def close(self, **how):
        note("close")
        if "slow" in sys.argv:
            time.sleep(1.0 if "second" in sys.argv else 600)
        super().close(**how)
        note("closed")

agent.Saver = Noting
main(sys.argv[1:])
"""


def drive(jobs: Jobs, *arguments: str) -> subprocess.Popen[str]:
    return jobs.start(*arguments, launcher=[sys.executable, "-c", DRIVER])


def noted(folder: Path) -> list[str]:
    path = folder / "saver"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("broken", [[], ["broken"]])
def test_the_saver_pins_memory_once_all_workers_are_reaped(jobs: Jobs, tmp_path: Path, broken: list[str]) -> None:
    """And its trouble does not keep the workers from their restart."""
    job = drive(jobs, "--nproc-per-node=2", "--max-restarts=1", program("end.py"), "three", *broken)
    job.communicate(timeout=120)
    assert job.returncode == 1
    pinned = ["breakpoint, all reaped"] * 2
    assert noted(tmp_path) == ["start", *pinned, "close", "closed"]


@pytest.mark.parametrize(("count", "ends"), [(2, ["close", "closed"]), (3, ["close"])])
def test_a_third_signal_gives_up_the_last_flush(jobs: Jobs, tmp_path: Path, count: int, ends: list[str]) -> None:
    job = drive(jobs, program("end.py"), "wait", "slow", "second" if count == 2 else "third")
    until(lambda: ready(tmp_path, 1), "readiness")
    job.terminate()
    until(lambda: "close" in noted(tmp_path), "the flush")
    job.terminate()
    assert any("the last flush goes on; 1 more to give it up" in line for line in job.stderr)
    if count == 3:
        job.terminate()
    job.communicate(timeout=60)
    assert job.returncode == 1
    assert noted(tmp_path) == ["start", "flush", *ends], "flushed while the workers end, and to the end"


def test_an_unhealthy_group_without_restarts_left_is_a_failure(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would return UNHEALTHY with no restarts left, and end the job with exit code 0."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    spec = WorkerSpec("default", 1, rdzv_handler=None, entrypoint="sleep", monitor_interval=0.1)
    agent = FastckptAgent(spec, settings=Settings(), logs_specs=DefaultLogsSpecs(str(here)))
    group: WorkerGroup = agent.get_worker_group()
    group.workers = [Worker(0, 0, 0, 1, 1)]
    group.workers[0].id = child.pid

    class Context:
        def wait(self, timeout: float) -> None:
            return None

        def pids(self) -> dict[int, int]:
            return {0: child.pid}

        def close(self) -> None:
            child.kill()
            child.wait()

    agent._pcontext = Context()
    agent._uninterruptible_state_timeout = 1.0
    monkeypatch.setattr(LocalElasticAgent, "_update_uninterruptible_dwell", lambda *_: 2.0)
    result = agent._monitor_workers(group)
    assert result.state == WorkerState.FAILED
    assert (result.failures[0].pid, result.failures[0].exitcode) == (child.pid, -9)
    assert child.returncode == -9


def test_the_death_watch_reaps_no_worker() -> None:
    child = subprocess.Popen(["sh", "-c", "exit 7"])
    watch = DeathWatch({3: child.pid})
    (death,) = watch.wait(60)
    assert (death.local_rank, death.pid, death.exitcode) == (3, child.pid, 7)
    assert watch.wait(0) == []
    assert peek(child.pid) == 7
    assert child.wait() == 7
    assert peek(child.pid) is None
    assert DeathWatch({0: child.pid}).wait(0) == []  # gone before the watch began
    watch.close()
    watch.close()


LATE = """
import os, sys, threading, time
from pathlib import Path
from fastckpt_run import torchrun_patches
from fastckpt_run.main import main

bind, folder = torchrun_patches.die_with, Path(os.environ["JOB_FOLDER"])

def late(parent):
    thread = threading.current_thread() is threading.main_thread()
    (folder / f"forked.{os.getpid()}").write_text("main thread" if thread else "another thread")
    time.sleep(1)
    bind(parent)

torchrun_patches.die_with = late
main(sys.argv[1:])
"""


def test_a_worker_whose_agent_dies_while_it_starts_dies(jobs: Jobs, tmp_path: Path) -> None:
    """Between the fork and the binding: the kernel cannot tell it of a death that was before.

    It is started from the agent's main thread: the kernel would also kill it with a thread that ended before.
    """
    job = jobs.start("--fast-no-preload", FAMILY, launcher=[sys.executable, "-c", LATE])
    until(lambda: any(tmp_path.glob("forked.*")) or job.poll() is not None, "the fork")
    job.kill()
    (forked,) = tmp_path.glob("forked.*")
    worker = int(forked.suffix[1:])
    until(lambda: not alive(worker), "the worker's death")
    assert forked.read_text() == "main thread"
    assert not ready(tmp_path, 1), "it never ran its script"


def test_a_worker_whose_agent_died_before_it_could_be_bound_dies() -> None:
    pid = os.fork()
    if pid == 0:
        die_with(parent=1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_exit_codes_are_described_in_words() -> None:
    assert [describe(code) for code in (0, 3, -9, -99, None)] == [
        "exit code 0",
        "exit code 3",
        "SIGKILL",
        "signal 99",
        "exit code unknown",
    ]


def test_a_torn_error_file_is_dropped(tmp_path: Path) -> None:
    """torch raises on one in the agent, which would end the job."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    whole.write_text('{"message": "x"}')
    torn.write_text('{"message": {"mess')
    for path in (whole, torn, tmp_path / "none", Path(os.devnull)):
        drop_if_torn(path)
    assert (whole.exists(), torn.exists()) == (True, False)


@pytest.mark.parametrize("grace", [(), ("--fast-stop-grace=5",)], ids=["at once", "grace"])
def test_shared_memory_and_logs_of_killed_workers_are_cleaned_up_and_what_computes_is_not_left(
    jobs: Jobs, tmp_path: Path, grace: tuple[str, ...]
) -> None:
    name = f"fastckpt_test_{os.getpid()}_{len(grace)}"
    job = jobs.run(
        "--standalone", "--nproc-per-node=2", "--max-restarts=1", *grace, program("segments.py"), str(tmp_path), name
    )
    assert job.returncode == 0, job.stderr
    left = [each for each in (tmp_path / "segments").read_text().split() if Path("/dev/shm", each).exists()]
    logs = {log.name: log.read_text() for log in tmp_path.glob("log-*")}
    if grace:  # SIGTERM is for all that a worker has started
        del logs["log-0-0"]
    assert not left and len(logs) == 4 - len(grace) and {*logs.values()} == {"the last line\n"}
    assert not [path for path in tmp_path.glob("child.*") if alive(int(path.suffix[1:]))]
