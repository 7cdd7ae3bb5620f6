"""Launch jobs in processes of their own, or in this one, and watch what becomes of them."""

import faulthandler
import gc
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATH
from tests.support import launchers
from tests.support.json_lines import whole_lines
from tests.support.waits import until as until

PROGRAMS = Path(__file__).parent / "programs"
OURS = "import sys; from fastckpt_run.main import main; main(sys.argv[1:])"
TEMPLATE = "import sys; from tests.faults.launch import main, with_a_template; with_a_template() and main(sys.argv[1:])"
"""A launcher of which a fork is the template, which need not import torch."""
FORK = ("--run-path", "--start-method=fork")
"""Has workers forked from the agent, which need not import torch."""


def program(name: str) -> str:
    return str(PROGRAMS / name)


LIGHT = f"{program('frail')}:{PATH}"
"""A PYTHONPATH with which templates do not import torch."""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which nobody may come to reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(folder: Path) -> set[int]:
    """The processes that wrote a file ``pid.<number>`` into ``folder``."""
    return {int(path.suffix[1:]) for path in folder.glob("pid.*")}


class Launch:
    """A launcher that runs, or has; what it prints is in two files."""

    def __init__(self, process: "subprocess.Popen[bytes]", out: Path, err: Path) -> None:
        self.process, self._out, self._err = process, out, err
        self.pid, self.wait, self.poll = process.pid, process.wait, process.poll
        self.kill, self.terminate, self.send_signal = process.kill, process.terminate, process.send_signal

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def ends(self, code: int = 0) -> str:
        """Wait for its end, which is to be with this exit code; what it wrote on stderr."""
        assert self.wait(120) == code, self.stdout + self.stderr
        return self.stderr


class Jobs:
    """Starts launchers as a user would, in a folder; each is a fork with a session of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "JOB_FOLDER": str(folder)}
        self.started: list[Launch] = []
        self._outputs = folder.with_name(f"{folder.name}-launches")
        self._outputs.mkdir()

    def start(self, *arguments: str, launcher: str = OURS, **environment: str) -> Launch:
        """Start a launcher, which is the code of a program."""
        variables = self.environment | environment
        out, err = (self._outputs / f"{name}-{len(self.started)}" for name in ("out", "err"))
        err.touch()
        command = [program("launch.py"), str(self.folder), str(err), variables["PYTHONPATH"], launcher, *arguments]
        variables |= {"PYTHONPATH": PATH}
        with out.open("ab") as output:
            process = launchers.start(command, variables, output.fileno())
        self.started.append(Launch(process, out, err))
        return self.started[-1]

    def run(self, *arguments: str, code: int = 0, **options: str) -> Launch:
        """Start a launcher, and wait until it has ended with an exit code."""
        job = self.start(*arguments, **options)
        job.ends(code)
        return job

    def launch(self, *arguments: str, code: int = 0, **options: str) -> Launch:
        """Run a launcher that tells its events in the file ``events``."""
        return self.run(f"--fast-events={self.folder / 'events'}", *arguments, code=code, **options)

    def told(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names, of those that were told so far."""
        return [event for event in whole_lines(self.folder / "events") if event["event"] in names]

    def end(self) -> None:
        """Clean up after a test that failed."""
        for pid in filter(alive, pids_in(self.folder)):
            os.kill(pid, signal.SIGKILL)
        for job in self.started:
            if job.poll() is None:
                job.kill()
            job.wait()


@pytest.fixture(params=["executed", "forked"])
def started(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to start workers; the template of these forks does not import torch, which takes its time."""
    if request.param == "forked":
        monkeypatch.setenv("FASTCKPT_PRELOAD", "math")
        monkeypatch.setenv("PYTHONPATH", LIGHT)
    return request.param


@pytest.fixture
def jobs(tmp_path: Path, forked_launchers: None) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.end()


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
