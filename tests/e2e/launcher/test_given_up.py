"""A flush that does not end keeps neither the job nor the process."""

import time

from tests.e2e.launcher.conftest import FORK, OURS, Jobs, program

HANGS = f"""
import time
from fastckpt._core import metrics
metrics.observe(lambda phase, fields: time.sleep(120) if phase == "persist.write" else None)
{OURS}
"""


def test_the_flush_timeout_ends_a_launcher_whose_flush_hangs(jobs: Jobs) -> None:
    start = time.monotonic()
    done = jobs.run(*FORK, "--fast-flush-timeout=1", program("save.py"), launcher=HANGS, code=75)  # nothing is durable
    assert "step 0 of history 1 is in memory only" in done.stderr
    assert time.monotonic() - start < 100
    jobs.run(*FORK, program("save.py"), "--saves=0")
