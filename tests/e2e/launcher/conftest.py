"""Launch jobs in processes of their own, or in this one, and watch what becomes of them."""

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE = 60.0

OURS = (sys.executable, "-m", "fastckpt_run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def program(name: str) -> str:
    return str(PROGRAMS / name)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition`` holds; the deadline is generous, for noisy machines."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {DEADLINE} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which nobody may come to reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(folder: Path) -> set[int]:
    """The processes that wrote a file ``pid.<number>`` into ``folder``."""
    return {int(path.suffix[1:]) for path in folder.glob("pid.*")}


class Jobs:
    """Starts launchers as a user would, in a session of their own, below a temporary directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "JOB_FOLDER": str(folder)}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, launcher: Iterable[str] = OURS, **environment: str) -> subprocess.Popen[str]:
        job = subprocess.Popen(
            [*launcher, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment | environment,
            cwd=self.folder,
            text=True,
            start_new_session=True,
        )
        self.started.append(job)
        return job

    def run(self, *arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
        job = self.start(*arguments, **options)
        out, err = job.communicate(timeout=180)
        return subprocess.CompletedProcess(job.args, job.returncode, out, err)


@pytest.fixture(params=["executed", "forked"])
def started(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to start workers; the template of these forks does not import torch, which takes its time."""
    if request.param == "forked":
        monkeypatch.setenv("FASTCKPT_PRELOAD", "math")
        monkeypatch.setenv("PYTHONPATH", program("frail"))
    return request.param


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    for pid in filter(alive, pids_in(tmp_path)):
        os.kill(pid, signal.SIGKILL)  # only if a test has failed
    for job in jobs.started:
        if job.poll() is None:
            job.kill()
        job.wait()
        for stream in (job.stdout, job.stderr):
            stream.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job launched by this process leaves its signal handlers, variables and fault handler as they were."""
    monkeypatch.setenv("JOB_FOLDER", str(tmp_path))
    monkeypatch.setenv("TEST_SENTINEL", "of the parent")
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    faulting = faulthandler.is_enabled()
    handled = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    yield tmp_path
    for number, handler in handled.items():
        signal.signal(number, handler)
    if not faulting:
        faulthandler.disable()
    gc.collect()  # the traceback of a failed launch holds its stores
