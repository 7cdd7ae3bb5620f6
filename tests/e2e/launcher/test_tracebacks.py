"""Tracebacks at the end of a job: once each, where it was raised; of lost connections only without another cause."""

import json
import re
import socket
from pathlib import Path

import pytest

from tests.e2e.launcher.conftest import FORK, TEMPLATE, Jobs, program

END, LONELY = program("end.py"), program("lonely.py")
WHERE = "in fail (end.py:13)"


@pytest.mark.parametrize(
    ("streams", "recorded"),
    [
        ([], []),
        (["--tee=3"], []),
        (FORK, ["recorded"]),
    ],
    ids=lambda some: "".join(some) or "none",
)
def test_a_traceback_is_printed_once(jobs: Jobs, tmp_path: Path, recorded: list[str], streams: list[str]) -> None:
    logs = f"--log-dir={tmp_path / 'logs'}"
    reply = tmp_path / "error.json"
    script, variables = (END, "raise", *recorded), {"TORCHELASTIC_ERROR_FILE": str(reply)} if recorded else {}
    errors = jobs.run("--nproc-per-node=2", logs, *streams, *script, code=1, **variables).stderr
    assert errors.count("Traceback (most recent call last)") == errors.count('raise ValueError("MARK")') == 1, errors
    assert "rank      : 0 (local_rank: 0)" in errors.partition("Root Cause")[2]
    assert recorded or "from the agent, because another worker had failed" in errors.partition("Root Cause")[0]
    [told] = [line for line in errors.splitlines() if line.startswith("fastckpt-run: rank ")]
    why = f", ValueError: MARK, {WHERE}" if streams or recorded else ""
    log = rf", log {tmp_path}/logs/.*/0/stderr\.log" if streams and not recorded else ""
    end = rf"; not restarted: --max-restarts is 0 \(on {socket.gethostname()}{log}\) \(FC-027, docs/errors.md#fc-027\)"
    assert re.fullmatch(re.escape(f"fastckpt-run: rank 0 died: exit code 1{why}") + end, told)
    if recorded:  # it reaches the agent's own parent
        assert json.loads(reply.read_text())["message"]["message"] == "ValueError: MARK"


HOW = {"launcher": TEMPLATE, "FASTCKPT_PRELOAD": "auto"}


def test_only_the_traceback_of_the_rank_that_fails_is_shown(jobs: Jobs, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    job = jobs.run("--nproc-per-node=2", f"--log-dir={logs}", LONELY, "fails", code=1, **HOW)
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert 'raise ValueError("MARK")' in job.stderr and "closing signal" not in job.stderr
    assert "failed (exitcode: 1) local_rank: " in next(logs.glob("*/launcher.log")).read_text()
    folded = {path.parent.name: path.read_text() for path in logs.glob("*/attempt_0/*/traceback.log")}
    assert folded.keys() <= {"0"} and all("in all_reduce" in text for text in folded.values())  # or was killed
    [told] = [line for line in job.stderr.splitlines() if "rank 1 died" in line]  # there is no log of a forked worker
    assert "ValueError: MARK" in told and "by peer" not in told and "rank 0 died" not in job.stderr
    assert not folded or " lost the connection to a rank that failed; traceback in " in job.stderr


def test_a_connection_that_is_lost_without_another_cause_is_shown_once(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run(f"--log-dir={tmp_path / 'logs'}", LONELY, "loses", code=1, **HOW)
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert 'raise RuntimeError("MARK: Connection closed by peer")' in job.stderr
    assert re.search("rank 0 died.*by peer", job.stderr), job.stderr
    assert "its traceback is in" in job.stderr.partition("Root Cause")[2]
