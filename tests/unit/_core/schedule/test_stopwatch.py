"""Processor time of a rank and its saver, of real processes."""

import subprocess
import sys
import time

import pytest

from fastckpt._core.schedule.stopwatch import ProcessorTime

SAVER = """
import time
print("begun", flush=True)
while time.process_time() < 0.3:
    pass
print("used", flush=True)
input()
"""


def use(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def cores() -> float:
    return 1 / (ProcessorTime(0, 1)() / time.process_time())


def test_processor_time_is_that_of_the_rank_and_its_part_of_the_saver():
    """Of two ranks on a node each has half of the cores, and half of what the saver uses."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SAVER], text=True, **pipes) as saver:
        assert saver.stdout.readline() == "begun\n"
        processor = ProcessorTime(saver.pid, 2)
        own, before = time.process_time(), processor()
        assert saver.stdout.readline() == "used\n"
        use(0.1)
        used = (processor() - before) * cores()
        own = time.process_time() - own
        assert 0.0 < used - 2 * own < 0.4
        saver.communicate("\n")
    assert processor() * cores() == pytest.approx(2 * time.process_time(), rel=0.1), (
        "a saver that has ended counts no more"
    )
