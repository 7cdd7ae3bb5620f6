"""Two jobs that save to one directory: the second waits, is refused, or supersedes; no saved step is lost."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import Job
from tests.support.live_folders import remove_live


@pytest.fixture(autouse=True)
def hosts() -> Iterator[None]:
    """Removes the memory of all hosts: jobs that were killed, or that another took the place of, have kept theirs."""
    yield
    mine = Path(os.environ["FASTCKPT_SHM_DIR"])
    for memory in mine.iterdir():
        remove_live(memory)
    for telemetry in Path("/dev/shm").glob(f"*.{mine.name}.*"):
        telemetry.unlink()


def start(job: Job, *script: str, options: tuple[str, ...] = ()) -> Job:
    """Start one rank on a host whose shared memory is its own."""
    memory = Path(os.environ["FASTCKPT_SHM_DIR"], job.folder.name)
    memory.mkdir(mode=0o700, exist_ok=True)
    shape = ("--standalone", "--nproc-per-node", "1", "--max-restarts", "3", *options)
    launcher = (str(Path(__file__).with_name("launch.py")), str(job.folder), *shape)
    return job.start(*script, launcher=launcher, FASTCKPT_SHM_DIR=str(memory))


def holder(job: Job) -> str:
    return f"process {job.process.pid} on "


def test_a_second_job_on_one_directory_is_refused_or_takes_over(new_job, tmp_path: Path) -> None:
    """It is on another host: what is in memory is not its."""
    here = tmp_path / "shared"
    one, other = new_job("one", here), new_job("other", here)
    start(one, "--stop-at", "31").wait_for("waiting", 31)
    one.until(lambda: one.persisted(30), "step 30 durable")
    assert start(other).wait() == 1
    text = other.text()
    assert text.count("waiting, for up to 60 s, for " + holder(one)) == 1, "no restart waits again\n" + text
    assert f"PlaceInUse: {here} is in use by another job, which lives: {holder(one)}" in text
    assert "launch @fastckpt-" in text and " since 20" in text and "start with --fast-take-over" in text
    assert other.losses(0) == {} and one.stored()[:1] == [30]

    taker = start(new_job("taker", here), "--stop-at", "41", options=("--fast-take-over",))
    taker.wait_for("waiting", 41)
    assert taker.resumes() == [(30, "storage")] and f"taking over {here} from {holder(one)}" in taker.text()
    assert one.wait() == 1, one.text()
    assert f"{here} has been taken by another job, which opened history 2: {holder(taker)}" in one.text()
    taker.until(lambda: taker.persisted(40), "step 40 durable")
    taker.send(signal.SIGTERM)
    taker.wait()
    assert taker.stored()[:2] == [40, 30], "the one that was ended has published nothing more"
    assert "is not there any more" not in one.text() + taker.text()


def test_workers_restart_from_a_step_that_became_durable_since_they_began(
    new_job, uninterrupted, tmp_path: Path
) -> None:
    """Another job stood still before a rename, and reported the step before anybody had opened a newer history."""
    job = new_job()
    job.start("--stop-at", "41")
    job.wait_for_all(41)
    job.until(lambda: job.persisted(40), "step 40 durable")
    job.send(signal.SIGTERM)
    job.wait()
    newest = job.checkpoint_dir / "checkpoint-40"
    newest.rename(tmp_path / "not yet")
    job.start("--wait-at", "31")
    job.wait_for_all(31)
    (tmp_path / "not yet").rename(newest)
    job.go_on(31)
    assert job.wait() == 0, job.text()
    assert job.resumes(0) == job.resumes(1) == [(0, ""), (30, "storage"), (40, "storage")]
    assert "stopping the workers: step 40 of history 1 became durable in" in job.text()
    assert job.ends() == uninterrupted().ends() and job.losses(0) == uninterrupted().losses(0)
