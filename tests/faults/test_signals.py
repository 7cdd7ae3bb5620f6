"""Signals to the agent: memory is flushed within the time that clusters grant, and the exit code is torchrun's."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.faults.faults import delay, stop
from tests.faults.jobs import TORCHRUN, assert_as_if_nothing_had_happened

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, as Kubernetes and Slurm have them by default."""
SLOW = 2.0


@pytest.fixture
def torchrun(tmp_path):
    """torchrun with two workers that sleep."""
    command = [sys.executable, *TORCHRUN, "--no-python", "sleep", "600"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        while sum(child.name() == "sleep" for child in psutil.Process(process.pid).children()) < 2:
            time.sleep(0.05)
        yield process
        process.terminate()


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGTERM], marks=pytest.mark.campaign),
        [signal.SIGTERM, signal.SIGTERM],
        [signal.SIGINT],
        [signal.SIGHUP],
    ],
    ids=lambda signals: "-".join(number.name for number in signals),
)
def test_a_signal_flushes_and_ends_as_under_torchrun(new_job, uninterrupted, torchrun, signals):
    job = new_job().with_faults(delay(SLOW, at="persist.write")).start("--stop-at", "37", "--disk", "1000")
    job.wait_for_all(37)
    saved, sent = job.newest_saved(), time.monotonic()
    torchrun.send_signal(signals[0])
    for number in signals:
        job.process.send_signal(number)
        time.sleep(0.5)
    assert job.process.poll() is None, "it ended before its flush"
    assert job.wait() == torchrun.wait(60), job.text()
    assert SLOW < time.monotonic() - sent < GRACE
    assert job.injected() == 1
    assert job.stored()[0] == saved
    assert not job.arena().exists()
    job.run()
    assert job.resumes()[1:] == [(saved, "storage")]
    assert_as_if_nothing_had_happened(job, uninterrupted())


def test_a_stopped_worker_does_not_delay_the_flush(new_job, uninterrupted):
    """It hears no SIGTERM, for which torch would wait half a minute."""
    job = new_job().with_faults(stop(rank=1, at="snapshot.fill", step=30)).start()
    job.until(lambda: job.injected() > 0, "the stop")
    job.until(lambda: job.is_stopped(1), "rank 1 stopped")
    saved, sent = job.newest_saved(), time.monotonic()
    job.process.terminate()
    assert job.wait() == 1, job.text()
    assert time.monotonic() - sent < GRACE / 2
    assert job.stored()[0] in (saved, 30), "it may finish its save before it hears"
    saved = job.stored()[0]
    job.run()
    assert job.resumes()[1:] == [(saved, "storage")]
    assert_as_if_nothing_had_happened(job, uninterrupted())


def test_a_worker_that_ignores_sigterm_does_not_delay_the_flush(new_job):
    """It is killed in the end, after the half minute that torch gives it; by then memory is on storage."""
    job = new_job().start("--stop-at", "37", "--deaf")
    job.wait_for_all(37)
    saved, sent = job.newest_saved(), time.monotonic()
    job.process.terminate()
    job.until(lambda: job.stored()[0] == saved, "the flush")
    assert time.monotonic() - sent < GRACE / 2
    for rank in (0, 1):
        os.kill(job.pid(rank), signal.SIGKILL)  # rather than wait
    assert job.wait() == 1, job.text()
