"""Deaths are noticed when they happen, and no process outlives the job it belongs to."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fastckpt_run.failures.deaths import DeathWatch, peek
from fastckpt_run.parent_death import die_with
from fastckpt_run.workers import drop_if_torn, terminate_gracefully
from tests.e2e.launcher.conftest import FORK, LIGHT, Jobs, Launch, alive, pids_in, program, until

FAMILY = program("family.py")
EXEC = ("--fast-no-preload",)


def pid_of(folder: Path, rank: int) -> int:
    """The pid of a rank, once it is ready."""
    return int((folder / f"ready.{rank}").read_text())


def start(jobs: Jobs, *options: str, ranks: str, **how: str) -> Launch:
    """Start workers of these kinds; returns when all are ready."""
    kinds = ranks.split()
    job = jobs.start(*options, f"--nproc-per-node={len(kinds)}", FAMILY, *kinds, PYTHONPATH=LIGHT, **how)
    until(lambda: len([*jobs.folder.glob("ready.*")]) == len(kinds) or job.poll() is not None, "readiness")
    return job


def assert_no_survivors(folder: Path, ranks: int) -> None:
    assert [(folder / f"survivors.{rank}").read_text() for rank in range(ranks)] == [""] * ranks


def wait_all_dead(folder: Path) -> None:
    until(lambda: not any(map(alive, pids_in(folder))), f"the death of {pids_in(folder)}")


@pytest.mark.parametrize("path", [EXEC, FORK], ids=["exec", "run-path"])
def test_workers_stopped_for_another_failure_get_sigterm_and_the_stop_grace(
    jobs: Jobs, tmp_path: Path, path: tuple[str, ...]
) -> None:
    """Stopped ones, too, are asked; who is deaf is killed when it is over, and nobody lives to see the restart."""
    job = start(jobs, *path, "--fast-stop-grace=1", "--max-restarts=1", ranks="tidy tidy stopped deaf")
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    errors = job.ends()
    assert {path.name for path in tmp_path.glob("cleaned.*")} == {"cleaned.0", "cleaned.2"}
    assert_no_survivors(tmp_path, 4)
    assert errors.count("did not end processes [") == 1, errors


def test_a_worker_without_a_process_group_gets_sigterm_itself() -> None:
    """Such as a function before it has come to its own session; nobody is reaped."""
    child = subprocess.Popen(["sleep", "600"])
    begin = time.monotonic()
    terminate_gracefully([child.pid], 600)
    assert time.monotonic() - begin < 60
    assert (peek(child.pid), child.wait()) == (-signal.SIGTERM, -signal.SIGTERM)


def test_workers_of_a_killed_agent_die_also_if_a_fork_server_is_their_parent(jobs: Jobs, tmp_path: Path) -> None:
    job = start(jobs, "--run-path", "--start-method=forkserver", ranks="deaf deaf")
    workers = [pid_of(tmp_path, rank) for rank in (0, 1)]
    assert all(map(alive, workers))
    job.kill()
    until(lambda: not any(map(alive, workers)), "the workers' death")
    for orphan in pids_in(tmp_path) - set(workers):  # what they forked is not the agent's to know
        os.kill(orphan, signal.SIGKILL)


def test_sigterm_to_the_agent_lets_workers_clean_up_and_kills_children_that_they_leave(
    jobs: Jobs, tmp_path: Path
) -> None:
    job = start(jobs, "--shutdown-timeout=1", ranks="tidy deaf tidy")
    job.terminate()
    assert job.ends(1).splitlines()[-1] == "fastckpt-run: stopped by SIGTERM"
    assert {path.name for path in tmp_path.glob("cleaned.*")} == {"cleaned.0", "cleaned.2"}
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
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

torchrun_patches.BoundSubprocessHandler.__init__ = signalled
main(sys.argv[1:])
"""


def test_sigterm_while_workers_are_started_leaves_none_and_no_child_of_one(jobs: Jobs, tmp_path: Path) -> None:
    """torch does not know them yet, so it ends none."""
    job = jobs.start("--nproc-per-node=2", FAMILY, "deaf", "deaf", launcher=STARTING)
    assert job.ends(1).splitlines()[-1] == "fastckpt-run: stopped by SIGTERM"
    wait_all_dead(tmp_path)


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


def test_a_worker_whose_agent_died_before_it_could_be_bound_dies() -> None:
    pid = os.fork()
    if pid == 0:
        die_with(parent=1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_a_torn_error_file_is_dropped(tmp_path: Path) -> None:
    """torch raises on one in the agent, which would end the job."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    whole.write_text('{"message": "x"}')
    torn.write_text('{"message": {"mess')
    for path in (whole, torn, tmp_path / "none", Path(os.devnull)):
        drop_if_torn(path)
    assert (whole.exists(), torn.exists()) == (True, False)


def test_shared_memory_and_logs_of_killed_workers_are_cleaned_up_and_what_computes_is_not_left(
    jobs: Jobs, tmp_path: Path
) -> None:
    two = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    jobs.run(*two, program("segments.py"), str(tmp_path), f"fastckpt_test_{os.getpid()}")
    left = [each for each in (tmp_path / "segments").read_text().split() if Path("/dev/shm", each).exists()]
    logs = [log.read_text() for log in tmp_path.glob("log-*")]
    assert not left and logs == ["the last line\n"] * 4
    assert not [path for path in tmp_path.glob("child.*") if alive(int(path.suffix[1:]))]
