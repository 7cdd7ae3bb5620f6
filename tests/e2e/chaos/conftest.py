"""Jobs of a tiny training that commands of `fastckpt` kill in: launchers are forked, and their workers as well."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import fastckpt  # noqa: F401  # a fixture
from tests.faults.jobs import launcher_for
from tests.support import launchers
from tests.support.waits import until

TRAIN = str(Path(__file__).with_name("train.py"))


def start_forked(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """fastckpt-run in a fork; as `fastckpt_run.bound_launch.start_bound` starts it otherwise."""
    command = [*launcher_for(Path(environment["TMPDIR"])), *arguments]
    return launchers.start(command, {**environment, "FASTCKPT_PRELOAD": "auto"}, output)


@contextmanager
def stopped_after(condition: Callable[[], Any], number: int) -> Iterator[None]:
    """This process is signalled half a second after a condition has come true."""

    def stop() -> None:
        until(condition, "what the signal follows")
        time.sleep(0.5)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    yield
    thread.join()


class ChaosJob:
    """Launches of the training in a folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "checkpoints"
        self.directory.mkdir(parents=True)
        self._folder, self._output = folder, folder / "output"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, restarts: int = 9, ranks: int = 2) -> None:
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--fast-max-stalls=0"]
        environment = os.environ | {"TMPDIR": str(self._folder)}
        own = [TRAIN, "--out", str(self.directory), "--steps", "100000", "--pause", "0.01"]
        with self._output.open("ab") as output:
            self._processes.append(start_forked([*options, *own], environment, output.fileno()))

    def wait(self) -> int:
        return self._processes[-1].wait(120)

    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
                process.wait(120)


@pytest.fixture
def job(tmp_path: Path, forked_launchers: None) -> Iterator[ChaosJob]:
    job = ChaosJob(tmp_path / "job")
    yield job
    job.stop()
