"""Processes beside a worker: the agent of its job, and ones that keep cores busy."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil

BUSY = "import torch; torch.set_num_threads(1); a = torch.randn(512, 512)\nwhile True: a = torch.tanh(a @ a)"


def agent() -> psutil.Process:
    """The agent of this worker's job: its parent, or that of the template from which it was forked."""
    return [each for each in psutil.Process().parents() if "fastckpt_run" in " ".join(each.cmdline())][-1]


def processor_seconds(process: psutil.Process) -> float:
    """Seconds of a processor that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def rest(process: psutil.Process, limit: float = 30.0) -> None:
    """Wait until a process has done what it had left to do: it uses less than a tenth of a processor for a second."""
    end, quiet = time.monotonic() + limit, 0
    while quiet < 2 and time.monotonic() < end:
        before = processor_seconds(process)
        time.sleep(0.5)
        quiet = quiet + 1 if processor_seconds(process) - before < 0.05 else 0


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Processes that keep so many cores busy, as training does."""
    with ExitStack() as stack:
        for _ in range(cores):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(process.kill)
        yield
