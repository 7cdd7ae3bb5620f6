"""The end of a job whose checkpoints are not durable: reported, and a failure if none is, or, if asked, the newest."""

import os
import re
import time
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.e2e.launcher.conftest import FORK, OURS, Jobs, program
from tests.support.json_lines import whole_lines
from tests.support.live_folders import remove_live

SAVE = program("save.py")
QUICK = (*FORK, "--nproc-per-node=1", "--fast-flush-timeout=1")
FULL, FLAG = "--fast-summary=full", "--fast-require-persist"


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """The option of a script to save where storage refuses it, as long as that leads nowhere."""
    (tmp_path / "storage").symlink_to("/proc/self/nowhere")
    return f"--path={tmp_path}/storage/model.pt"


def durable(folder: Path) -> list[int]:
    return sorted(stored.id.step for stored in CheckpointDirectory(folder / "checkpoints").checkpoints())


def forget_memory() -> None:
    for arena in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():
        remove_live(arena)


def test_a_job_whose_newest_checkpoint_is_not_durable_fails(jobs: Jobs, broken: str) -> None:
    """What memory holds is persisted by the next."""
    done = jobs.run(*QUICK, FULL, FLAG, SAVE, broken, "--saves=2", "--disk=2", code=75)
    assert "the script succeeded, but step 1 of history 1 is not durable in" in done.stderr
    assert "nowhere" in done.stderr, "the reason is part of it"
    assert "not durable  step 1 of history 1" in done.stderr
    storage = jobs.folder / "storage"
    storage.unlink()
    storage.mkdir()
    jobs.run(*QUICK, FLAG, SAVE, "--saves=0")
    assert durable(jobs.folder) == [1] and (storage / "model.pt").exists()


def test_a_failed_script_with_lost_checkpoints_keeps_its_exit_code_and_names_its_log(jobs: Jobs, broken: str) -> None:
    logs = ("--redirects=3", "--log-dir=logs", "--fast-no-event-log")
    done = jobs.run(*QUICK, FLAG, *logs, SAVE, broken, "--until-trouble", "--exit=3", code=1)  # torchrun's, for any
    assert "exitcode  : 3" in done.stderr and "the script succeeded" not in done.stderr
    lines = done.stderr.splitlines()
    start = next(number for number, line in enumerate(lines) if "save.py failed after" in line)
    assert re.search(r"save\.py failed after .*: rank 0 died: exit code 3$", lines[start])
    assert "NOTHING is durable: " in lines[start + 1] and "step 0 of history 1 is NOT durable" in lines[start + 1]
    (log,) = (jobs.folder / "logs").rglob("stderr.log")
    assert lines[start + 2] == f"  more: --fast-summary full; log of rank 0: {log.relative_to(jobs.folder)}"
    forget_memory()


def test_a_job_whose_memory_saves_need_no_flush_succeeds(jobs: Jobs) -> None:
    done = jobs.run(*QUICK, FLAG, "--fast-no-flush", FULL, SAVE, "--saves=1", "--disk=0")
    assert durable(jobs.folder) == []
    why = "1 checkpoint came to be whole in memory, and no further"
    assert f"  durable      NOTHING is durable: {why}\n" in done.stderr


def test_the_final_report_has_saves_skips_and_what_a_resume_found(jobs: Jobs) -> None:
    """Then 1 MB/s for states of 0.4 MB, saved far faster: the slots are the queue; a save that finds none is told."""
    done = jobs.launch(*QUICK, FULL, FLAG, SAVE, "--saves=3", "--disk=9", "--numbers=250000")
    lines = done.stderr.splitlines()
    assert lines[0] == f"fastckpt-run: checkpoints in {jobs.folder}/checkpoints"
    assert lines[1].startswith("  persisted    2 checkpoints, 2.1 MB in ")
    assert lines[2] == "  durable      step 2 of history 1"
    assert lines[3].endswith("s, of which") and lines[4].startswith("  useful steps ") and "2 steps" in lines[4]
    [event] = jobs.told("report")
    assert (event["persisted"], event["newest_durable"], event["not_durable"]) == (2, [1, 2], None)
    assert (event["persist_failures"], event["skipped"], event["bad"]) == (0, {}, [])
    bad = jobs.folder / "checkpoints/checkpoint-2/model.pt"
    bad.write_bytes(bytes(bad.stat().st_size))
    script = (SAVE, "--saves=30", "--numbers=100000", "--pause=0.03")
    text = jobs.launch(*FORK, "--nproc-per-node=1", FULL, "--fast-persist-mbps=1", *script).stderr
    saves = whole_lines(jobs.folder / "saves")[3:]
    skips = [save for save in saves if not save["saved"]]
    assert len(skips) > 10 and all("is being persisted" in save["reason"] for save in skips)
    assert f"skipped      {len(skips)} saves" in text and " as a step is being persisted" in text
    kept = [save["step"] for save in saves if save["saved"]]
    assert durable(jobs.folder) == [0, *kept], "what was not skipped is durable"
    assert "  resumed      1 time from storage\n  bad          1 checkpoint\n" in text
    assert "step 2 of history 1 in storage (rank 0: BadCheckpoint: " in text
    event = jobs.told("report")[-1]
    assert event["resumes"] == {"storage": 1} and len(event["bad"]) == 1


HANGS = f"""
import time
from fastckpt._core import metrics
metrics.observe(lambda phase, fields: time.sleep(120) if phase == "persist.write" else None)
{OURS}
"""


def test_a_flush_that_hangs_keeps_neither_the_job_nor_its_process(jobs: Jobs) -> None:
    start = time.monotonic()
    done = jobs.run(*QUICK, SAVE, launcher=HANGS, code=75)  # nothing is durable
    assert "step 0 of history 1 is in memory only" in done.stderr
    assert time.monotonic() - start < 100
    forget_memory()
