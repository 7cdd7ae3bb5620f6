"""Tracebacks of ranks that lose the connection to one that fails: in files, unless nothing else explains the end."""

import re
from pathlib import Path

from tests.e2e.launcher.conftest import TEMPLATE, Jobs, program

SCRIPT = program("lonely.py")
HOW = {"launcher": TEMPLATE, "FASTCKPT_PRELOAD": "auto"}


def test_only_the_traceback_of_the_rank_that_fails_is_shown(jobs: Jobs, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    job = jobs.run("--nproc-per-node=2", f"--log-dir={logs}", SCRIPT, "fails", code=1, **HOW)
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert 'raise ValueError("MARK")' in job.stderr and "closing signal" not in job.stderr
    assert "failed (exitcode: 1) local_rank: " in next(logs.glob("*/launcher.log")).read_text()
    folded = {path.parent.name: path.read_text() for path in logs.glob("*/attempt_0/*/traceback.log")}
    assert folded.keys() <= {"0"} and all("in all_reduce" in text for text in folded.values())  # or was killed
    [told] = [line for line in job.stderr.splitlines() if "rank 1 died" in line]
    assert "ValueError: MARK" in told and "by peer" not in told and "rank 0 died" not in job.stderr
    assert not folded or " lost the connection to a rank that failed; traceback in " in job.stderr


def test_a_connection_that_is_lost_without_another_cause_is_shown_once(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run(f"--log-dir={tmp_path / 'logs'}", SCRIPT, "loses", code=1, **HOW)
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert 'raise RuntimeError("MARK: Connection closed by peer")' in job.stderr
    assert re.search("rank 0 died.*by peer", job.stderr), job.stderr
    assert "its traceback is in" in job.stderr.partition("Root Cause")[2]
