"""Workers stopped for the failure of another: killed at once, or asked to end within the stop grace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastckpt_run.failures.deaths import peek
from fastckpt_run.workers import terminate_gracefully
from tests.e2e.launcher.conftest import Jobs, program, until


@pytest.mark.parametrize(
    ("path", "cleaned"),
    [
        (["--fast-no-preload"], []),
        (["--fast-no-preload", "--fast-stop-grace=3"], [0, 2]),
        (["--fast-preload=math", "--fast-stop-grace=3"], [0, 2]),
        (["--run-path", "--start-method=fork", "--fast-stop-grace=3"], [0, 2]),
    ],
    ids=["at once", "exec", "fork", "run-path"],
)
def test_workers_stopped_for_another_failure_get_sigterm_and_the_stop_grace(
    jobs: Jobs, tmp_path: Path, path: list[str], cleaned: list[int]
) -> None:
    """Stopped ones, too, are asked; who is deaf is killed when it is over, and nobody lives to see the restart."""
    job = jobs.start(*path, "--nproc-per-node=4", "--max-restarts=1", program("graceful.py"))
    until(lambda: len(list(tmp_path.glob("ready.*"))) == 5 or job.poll() is not None, "readiness")
    (victim,) = tmp_path.glob("ready.1.*")
    os.kill(int(victim.read_text()), signal.SIGKILL)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert sorted(int(path.suffix[1:]) for path in tmp_path.glob("cleaned.*")) == cleaned
    assert [(tmp_path / f"survivors.{rank}").read_text() for rank in range(4)] == [""] * 4
    assert errors.count("did not end processes [") == bool(cleaned), errors


def test_a_signal_to_the_agent_ends_the_stop_grace(jobs: Jobs, tmp_path: Path) -> None:
    """As it does while torch waits for workers."""
    job = jobs.start(
        "--fast-no-preload", "--fast-stop-grace=600", "--nproc-per-node=4", "--max-restarts=1", "--shutdown-timeout=1",
        program("graceful.py"),
    )  # fmt: skip
    until(lambda: len(list(tmp_path.glob("ready.*"))) == 5, "readiness")
    (victim,) = tmp_path.glob("ready.1.*")
    os.kill(int(victim.read_text()), signal.SIGKILL)
    until((tmp_path / "cleaned.2").exists, "the others are asked")
    job.terminate()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1 and errors.endswith("fastckpt-run: stopped by SIGTERM\n"), errors


def test_a_worker_without_a_process_group_gets_sigterm_itself() -> None:
    """Such as a function before it has come to its own session; nobody is reaped."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    begin = time.monotonic()
    terminate_gracefully([child.pid], 600)
    assert time.monotonic() - begin < 60
    assert (peek(child.pid), child.wait()) == (-signal.SIGTERM, -signal.SIGTERM)
