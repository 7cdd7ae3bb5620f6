"""A child in which checks run: it may hang, be killed or die, and leaves nothing behind."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from fastckpt._core.policy.node_check import Verdict
from fastckpt_run.node_check.check_process import CheckProcess
from tests.support.waits import until

LONG = {"check": "memory", "name": "memory", "size": 1 << 20, "seconds": 600.0}
SHORT = LONG | {"seconds": 0.0}


def test_one_child_runs_all_checks_and_one_that_is_stopped_is_given_up_at_its_deadline():
    with CheckProcess(60.0) as process:
        assert process.run(SHORT).verdict is Verdict.OK
        first = process._child.pid
        assert process.run(SHORT).verdict is Verdict.OK
        assert process._child.pid == first
        result = process.run(SHORT | {"colour": "red"})
        assert (result.verdict, result.message) == (Verdict.UNKNOWN, "its process died: exit code 1")
    assert not Path(f"/proc/{first}").exists()

    with CheckProcess(1.0) as process:
        process.run(SHORT)
        pid = process._child.pid
        os.kill(pid, signal.SIGSTOP)
        result = process.run(LONG)
        assert (result.verdict, result.message) == (Verdict.PROBLEM, "not done after 1 s: it hangs")
        assert result.seconds >= 1.0
        assert not Path(f"/proc/{pid}").exists()
        assert process.run(SHORT).verdict is Verdict.OK


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


def test_a_child_ends_with_the_process_that_started_it():
    read, write = os.pipe()
    if not (parent := os.fork()):
        process = CheckProcess(600.0)
        threading.Timer(0.5, lambda: (os.write(write, b"%d" % process._child.pid), os.kill(os.getpid(), 9))).start()
        with suppress(BaseException):
            process.run(LONG)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -9
    os.close(write)
    with open(read) as pid:
        child = Path(f"/proc/{int(pid.read())}")
    until(lambda: not child.exists(), "the child ends")
