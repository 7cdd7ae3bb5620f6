"""The end of a job whose checkpoints are not durable: reported, and a failure if none is, or, if asked, the newest."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.e2e.launcher.conftest import Jobs, program, until
from tests.support.live_folders import remove_live

SAVE = program("save.py")
QUICK = ("--nnodes=1", "--nproc-per-node=1", "--fast-flush-timeout=1")
FULL = "--fast-summary=full"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A path to save to that storage refuses as long as its folder leads nowhere."""
    (tmp_path / "storage").symlink_to("/proc/self/nowhere")
    return tmp_path / "storage" / "model.pt"


def durable(folder: Path) -> list[int]:
    return [stored.id.step for stored in CheckpointDirectory(folder / "checkpoints").checkpoints()]


def arguments(path: Path | str, *more: str) -> list[str]:
    return [SAVE, f"--path={path}", *more]


class TestRequired:
    FLAG = "--fast-require-persist"

    def test_a_job_whose_checkpoints_are_durable_succeeds(self, jobs: Jobs) -> None:
        done = jobs.run(*QUICK[:2], self.FLAG, SAVE)
        assert done.returncode == 0, done.stderr
        assert durable(jobs.folder) == [0]

    @pytest.mark.parametrize("disk", [pytest.param("1", marks=pytest.mark.campaign), "2"])
    def test_a_job_whose_newest_checkpoint_is_not_durable_fails(self, jobs: Jobs, broken: Path, disk: str) -> None:
        """Whether it was saved with DISK, or with MEMORY and flushed; what memory holds is persisted by the next."""
        done = jobs.run(*QUICK, FULL, self.FLAG, *arguments(broken, "--saves=2", f"--disk={disk}"))
        assert done.returncode == 75, done.stderr
        assert "the script succeeded, but step 1 of history 1 is not durable in" in done.stderr
        assert "nowhere" in done.stderr, "the reason is part of it"
        assert "not durable  step 1 of history 1" in done.stderr
        broken.parent.unlink()
        broken.parent.mkdir()
        again = jobs.run(*QUICK[:2], self.FLAG, *arguments("", "--saves=0"))
        assert again.returncode == 0, again.stderr
        assert durable(jobs.folder) == [1]
        assert broken.exists()

    def test_a_failed_script_with_lost_checkpoints_keeps_its_exit_code(self, jobs: Jobs, broken: Path) -> None:
        done = jobs.run(*QUICK, FULL, self.FLAG, *arguments(broken, "--until-trouble", "--exit=3"))
        assert done.returncode == 1, "as torchrun's for any failure"
        assert "exitcode  : 3" in done.stderr
        assert "the script succeeded" not in done.stderr
        assert "not durable  step 0 of history 1" in done.stderr
        forget_memory()

    def test_a_signal_with_lost_checkpoints_keeps_its_exit_code(self, jobs: Jobs, broken: Path) -> None:
        job = jobs.start(*QUICK, FULL, self.FLAG, *arguments(broken, "--saves=500", "--pause=0.1"))
        until(lambda: "\n" in read(jobs.folder / "saves"), "a save")
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=100)
        assert job.returncode == 1, err
        assert "stopped by SIGTERM" in err and "not durable  step " in err
        forget_memory()

    def test_a_job_whose_memory_saves_need_no_flush_succeeds(self, jobs: Jobs) -> None:
        done = jobs.run(*QUICK[:2], self.FLAG, "--fast-no-flush", FULL, SAVE, "--saves=1", "--disk=0")
        assert done.returncode == 0, done.stderr
        assert durable(jobs.folder) == []
        why = "1 checkpoint came to be whole in memory, and no further"
        assert f"  durable      NOTHING is durable: {why}\n" in done.stderr


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def forget_memory() -> None:
    for arena in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():
        remove_live(arena)


def blocks(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr[done.stderr.index("checkpoints in ") :]


class TestReport:
    @pytest.mark.parametrize("options", [[], [FULL]])
    def test_a_job_without_saves_prints_no_final_report(self, jobs: Jobs, options: list[str]) -> None:
        done = jobs.run(*QUICK, *options, SAVE, "--saves=0")
        assert (done.returncode, done.stderr) == (0, "")

    def test_the_final_report_of_a_good_job_has_its_saves(self, jobs: Jobs) -> None:
        done = jobs.run(*QUICK[:2], FULL, "--fast-events=events", SAVE, "--saves=3", "--disk=9", "--numbers=250000")
        lines = done.stderr.splitlines()
        assert lines[0] == f"fastckpt-run: checkpoints in {jobs.folder}/checkpoints"
        assert lines[1].startswith("  persisted    2 checkpoints, 2.1 MB in ")
        assert lines[2] == "  durable      step 2 of history 1"
        assert lines[3].endswith(" s, of which") and lines[4].startswith("  useful steps ") and "2 steps" in lines[4]
        (event,) = [e for e in map(json.loads, read(jobs.folder / "events").splitlines()) if e["event"] == "report"]
        assert (event["persisted"], event["newest_durable"], event["not_durable"]) == (2, [1, 2], None)
        assert (event["persist_failures"], event["skipped"], event["bad"]) == (0, {}, [])

    def test_the_final_report_has_what_a_resume_found(self, jobs: Jobs) -> None:
        assert jobs.run(*QUICK[:2], FULL, SAVE, "--saves=2", "--pause=0.5").returncode == 0
        bad = jobs.folder / "checkpoints" / "checkpoint-1" / "model.pt"
        bad.write_bytes(bytes(bad.stat().st_size))
        done = jobs.run(*QUICK[:2], FULL, "--fast-events=events", SAVE, "--saves=0")
        assert done.returncode == 0, done.stderr
        assert "  resumed      1 time from storage\n  bad          1 checkpoint\n" in blocks(done)
        assert "step 1 of history 1 in storage (rank 0: BadCheckpoint: " in blocks(done)
        (event,) = [e for e in map(json.loads, read(jobs.folder / "events").splitlines()) if e["event"] == "report"]
        assert event["resumes"] == {"storage": 1} and len(event["bad"]) == 1

    def test_a_job_of_which_nothing_is_durable_fails_without_the_option(self, jobs: Jobs, broken: Path) -> None:
        done = jobs.run(*QUICK, FULL, *arguments(broken, "--until-trouble"))
        assert done.returncode == 75, done.stderr
        assert "the script succeeded, but step 0 of history 1 is not durable in" in done.stderr
        assert "not durable  step 0 of history 1" in blocks(done)
        assert "persist" in blocks(done) and "nowhere" in blocks(done)
        [nothing] = [line for line in blocks(done).splitlines() if line.startswith("  durable ")]
        assert nothing.startswith("  durable      NOTHING is durable: ") and "nowhere" in nothing
        forget_memory()

    def test_slow_storage_skips_saves_and_takes_no_more_memory(self, jobs: Jobs) -> None:
        """1 MB/s for states of 0.4 MB, saved far faster: the slots are the queue; a save that finds none is told."""
        done = jobs.run(
            *QUICK[:2], FULL, "--fast-persist-mbps=1", "--fast-events=events",
            SAVE, "--saves=60", "--numbers=100000", "--pause=0.03",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        saves = [json.loads(line) for line in read(jobs.folder / "saves").splitlines()]
        skips = [save for save in saves if not save["saved"]]
        assert len(skips) == saves[-1]["skipped"] > 20
        assert all("is being persisted" in save["reason"] for save in skips)
        assert max(save["waiting"] for save in saves) <= 3, "never more on its way than there are slots"
        assert f"skipped      {len(skips)} saves" in blocks(done)
        assert " as a step is being persisted" in blocks(done)
        found = durable(jobs.folder)
        assert sorted(found) == [save["step"] for save in saves if save["saved"]], "what was not skipped is durable"
        (event,) = [e for e in map(json.loads, read(jobs.folder / "events").splitlines()) if e["event"] == "report"]
        assert sum(event["skipped"].values()) == len(skips)
        assert event["persisted"] == len(found)


class TestShort:
    """Three lines, unless the full summary is asked for."""

    def test_the_summary_of_a_good_job_has_three_lines(self, jobs: Jobs) -> None:
        done = jobs.run(*QUICK[:2], SAVE, "--saves=3", "--disk=9")
        folder = re.escape(f"{jobs.folder}/checkpoints")
        time = r"[\d.]+ (ms|s|min|min \d+ s)"
        first, second, third = done.stderr.splitlines()
        assert re.fullmatch(rf"fastckpt-run: save\.py succeeded after {time}", first)
        steps = r"2 steps done, 0 repeated, no restart, goodput [\d.]+ %"
        assert re.fullmatch(rf"  {steps}; in {folder} step 2 of history 1 is durable", second)
        assert third == f"  more: fastckpt report {jobs.folder}/checkpoints"

    def test_a_failure_its_log_and_what_is_not_durable_are_in_the_three_lines(self, jobs: Jobs, broken: Path) -> None:
        done = jobs.run(
            *QUICK,
            "--redirects=3",
            "--log-dir=logs",
            "--fast-no-event-log",
            *arguments(broken, "--until-trouble", "--exit=3"),
        )
        lines = done.stderr.splitlines()
        start = next(number for number, line in enumerate(lines) if "save.py failed after" in line)
        assert re.search(r"save\.py failed after .*: rank 0 died: exit code 3$", lines[start])
        assert "NOTHING is durable: " in lines[start + 1] and "step 0 of history 1 is NOT durable" in lines[start + 1]
        (log,) = (jobs.folder / "logs").rglob("stderr.log")
        assert lines[start + 2] == f"  more: --fast-summary full; log of rank 0: {log.relative_to(jobs.folder)}"
        forget_memory()

    def test_a_summary_of_another_length_is_refused(self, jobs: Jobs) -> None:
        done = jobs.run(*QUICK, "--fast-summary=long", SAVE)
        assert done.returncode == 2 and "summary is 'long'; give short or full (--fast-summary" in done.stderr
