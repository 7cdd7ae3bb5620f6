"""A child in which checks run: it may hang, be killed or die, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastckpt._core.policy.node_check import Verdict
from fastckpt_run.node_check.check_process import CheckProcess

LONG = {"check": "memory", "name": "memory", "size": 1 << 20, "seconds": 600.0}
SHORT = LONG | {"seconds": 0.0}


def test_one_child_runs_all_checks_that_end_well():
    with CheckProcess(60.0) as process:
        assert process.run(SHORT).verdict is Verdict.OK
        first = process._child.pid
        assert process.run(SHORT).verdict is Verdict.OK
        assert process._child.pid == first
        result = process.run(SHORT | {"colour": "red"})
        assert (result.verdict, result.message) == (Verdict.UNKNOWN, "its process died: exit code 1")
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.parametrize(
    ("number", "verdict", "name"),
    [(signal.SIGKILL, Verdict.UNKNOWN, "SIGKILL"), (signal.SIGSEGV, Verdict.PROBLEM, "SIGSEGV")],
)
def test_a_child_that_dies_is_replaced_and_what_killed_it_is_named(number, verdict, name):
    with CheckProcess(60.0) as process:
        process.run(SHORT)
        killer = threading.Timer(0.2, os.kill, (process._child.pid, number))
        killer.start()
        result = process.run(LONG)
        killer.join()
        assert (result.verdict, result.message) == (verdict, f"its process died: {name}")
        assert process.run(SHORT).verdict is Verdict.OK


def test_a_check_that_is_stopped_is_given_up_at_its_deadline():
    with CheckProcess(1.0) as process:
        process.run(SHORT)
        pid = process._child.pid
        os.kill(pid, signal.SIGSTOP)
        result = process.run(LONG)
        assert (result.verdict, result.message) == (Verdict.PROBLEM, "not done after 1 s: it hangs")
        assert result.seconds >= 1.0
        assert not Path(f"/proc/{pid}").exists()
        assert process.run(SHORT).verdict is Verdict.OK


def test_a_child_ends_with_the_process_that_started_it():
    program = f"""
import os, threading, time
from fastckpt_run.node_check.check_process import CheckProcess
process = CheckProcess(600.0)
def die():
    while process._child is None: time.sleep(0.01)
    time.sleep(0.2)
    print(process._child.pid, flush=True)
    os.kill(os.getpid(), 9)
threading.Thread(target=die).start()
process.run({LONG!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    end = time.monotonic() + 10
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < end, "the child lives on"
        time.sleep(0.02)
