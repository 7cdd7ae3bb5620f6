"""The end of a job: each traceback once, and where it was raised."""

import json
import re
import socket
from pathlib import Path

import pytest

from tests.e2e.launcher.conftest import FORK, LIGHT, Jobs, program

END = program("end.py")
WHERE = "in fail (end.py:13)"


@pytest.mark.parametrize(
    ("streams", "recorded"),
    [
        ([], []),
        (["--redirects=3"], []),
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


def test_the_exception_of_a_forked_worker_is_reported_without_a_log(jobs: Jobs) -> None:
    errors = jobs.run("--fast-preload=math", END, "raise", code=1, PYTHONPATH=LIGHT).stderr
    assert f"rank 0 died: exit code 1, ValueError: MARK, {WHERE}; not restarted" in errors, errors
    assert errors.count('raise ValueError("MARK")') == 1, errors
