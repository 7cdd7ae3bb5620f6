"""The end of a job: torchrun's exit codes, and each traceback once."""

import json
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.conftest import QUICK
from tests.e2e.launcher.conftest import OURS, TORCHRUN, Jobs, program, until

END = program("end.py")


@pytest.mark.parametrize("how", ["well", pytest.param("three", marks=pytest.mark.campaign), "raise", "kill", "wait"])
def test_exit_codes_equal_those_of_torchrun(jobs: Jobs, tmp_path: Path, how: str) -> None:
    folders = [tmp_path / "ours", tmp_path / "torchrun"]
    both = []
    for folder, launcher in zip(folders, (OURS, TORCHRUN), strict=True):
        folder.mkdir()
        both.append(jobs.start("--nproc-per-node=2", END, how, launcher=launcher, JOB_FOLDER=str(folder)))
    if how == "wait":
        for job, folder in zip(both, folders, strict=True):
            until(lambda folder=folder: len(list(folder.glob("ready.*"))) == 2, "readiness")
            job.send_signal(signal.SIGTERM)
    printed = [job.communicate(timeout=120)[1] for job in both]
    assert both[0].returncode == both[1].returncode, printed
    assert both[0].returncode == (0 if how == "well" else 1)


@pytest.mark.parametrize(
    ("streams", "recorded"),
    [
        ([], []),
        (["--redirects=3"], ["recorded"]),
        (["--tee=3"], []),
        *(
            pytest.param(streams, recorded, marks=pytest.mark.campaign)
            for streams, recorded in (([], ["recorded"]), (["--redirects=3"], []), (["--tee=3"], ["recorded"]))
        ),
    ],
    ids=lambda some: "".join(some) or "none",
)
def test_a_traceback_is_printed_once(jobs: Jobs, tmp_path: Path, recorded: list[str], streams: list[str]) -> None:
    job = jobs.run("--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}", *streams, END, "raise", *recorded)
    assert job.returncode == 1
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert job.stderr.count('raise ValueError("MARK")') == 1
    assert "rank      : 0 (local_rank: 0)" in job.stderr.partition("Root Cause")[2]
    assert "from the agent, because another worker had failed" in job.stderr.partition("Root Cause")[0]
    [told] = [line for line in job.stderr.splitlines() if line.startswith("fastckpt-run: rank ")]
    why = ", ValueError: MARK, in fail (end.py:20)" if streams or recorded else ""
    log = rf", log {tmp_path}/logs/.*/0/stderr\.log" if streams else ""
    end = rf"; not restarted: --max-restarts is 0 \(on {socket.gethostname()}{log}\) \(FC-027, docs/errors.md#fc-027\)"
    assert re.fullmatch(re.escape(f"fastckpt-run: rank 0 died: exit code 1{why}") + end, told)


def test_a_traceback_of_run_path_is_printed_once(jobs: Jobs) -> None:
    job = jobs.run("--run-path", END, "raise")
    assert job.returncode == 1
    assert "rank 0 died: exit code 1, ValueError: MARK, in fail (end.py:20); not restarted" in job.stderr
    assert job.stderr.count('raise ValueError("MARK")') == 1, job.stderr


def test_the_exception_of_a_forked_worker_is_reported_without_a_log(jobs: Jobs) -> None:
    job = jobs.run("--fast-preload=math", END, "raise", PYTHONPATH=f"{program('frail')}:{QUICK}")
    assert "rank 0 died: exit code 1, ValueError: MARK, in fail (end.py:20); not restarted" in job.stderr, job.stderr


def test_the_first_worker_to_fail_is_the_root_cause(jobs: Jobs) -> None:
    """Rank 1 is killed by the agent; ranks do not decide who is named."""
    job = jobs.run("--nproc-per-node=2", END, "three")
    assert "exitcode  : 3" in job.stderr.partition("Root Cause")[2]
    assert "exitcode  : -9" in job.stderr.partition("Root Cause")[0]
    told = [line for line in job.stderr.splitlines() if line.startswith("fastckpt-run: rank ")]
    host = socket.gethostname()
    where = f"(on {host}) (FC-027, docs/errors.md#fc-027)"
    assert told == [f"fastckpt-run: rank 0 died: exit code 3; not restarted: --max-restarts is 0 {where}"]


def test_the_error_file_reaches_the_agents_own_parent(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run(END, "raise", "recorded", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert job.returncode == 1
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: MARK"
