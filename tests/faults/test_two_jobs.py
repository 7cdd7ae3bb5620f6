"""Two jobs that save to one directory: the second waits, is refused, or supersedes; no saved step is lost."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.report.events import find, read
from fastckpt._core.report.report import report
from fastckpt._core.storage.store import open_store
from tests.faults.jobs import Job
from tests.support.live_folders import remove_live
from tests.unit._core.storage.s3 import s3, s3_server  # noqa: F401 (fixtures)

URL = "s3://bucket/run"


def steps_in(location: str | Path) -> list[int]:
    store = open_store(location)
    try:
        return [stored.id.step for stored in store.checkpoints()]
    finally:
        store.close()


@pytest.fixture(autouse=True)
def hosts() -> Iterator[None]:
    """Removes the memory of all hosts: jobs that were killed, or that another took the place of, have kept theirs."""
    yield
    mine = Path(os.environ["FASTCKPT_SHM_DIR"])
    for memory in mine.iterdir():
        remove_live(memory)
    for telemetry in Path("/dev/shm").glob(f"*.{mine.name}.*"):
        telemetry.unlink()


def start(job: Job, *script: str, options: tuple[str, ...] = (), shm: str = "") -> Job:
    """Start one rank on a host whose shared memory is its own."""
    memory = Path(os.environ["FASTCKPT_SHM_DIR"], shm or job.folder.name)
    memory.mkdir(mode=0o700, exist_ok=True)
    shape = ("--standalone", "--nproc-per-node", "1", "--max-restarts", "3", *options)
    launcher = (str(Path(__file__).with_name("launch.py")), str(job.folder), *shape)
    return job.start(*script, launcher=launcher, FASTCKPT_SHM_DIR=str(memory))


def end(job: Job, number: int = signal.SIGTERM) -> int:
    """Signal its agent; the code with which that ends."""
    job.send(number)
    return job.wait()


def holder(job: Job) -> str:
    assert job.process is not None
    return f"process {job.process.pid} on "


def test_a_second_job_on_one_directory_is_refused_or_takes_over(new_job, s3, tmp_path: Path) -> None:  # noqa: F811
    """One job saves; others share its remote store, or its directory from another host's memory."""
    here = tmp_path / "shared"
    one, store, directory = new_job("one", here), new_job("store"), new_job("directory", here)
    start(one, "--stop-at", "31", "--remote", URL).wait_for("waiting", 31)
    one.until(lambda: steps_in(URL)[:1] == [30], "step 30 on S3")
    start(store, "--remote", URL)
    start(directory)
    for refused, place in ((store, URL), (directory, here)):
        assert refused.wait() == 1
        text = refused.text()
        assert text.count("waiting, for up to 60 s, for " + holder(one)) == 1, "no restart waits again\n" + text
        assert f"PlaceInUse: {place} is in use by another job, which lives: {holder(one)}" in text
        assert "launch @fastckpt-" in text and " since 20" in text and "start with --fast-take-over" in text
        assert refused.losses(0) == {}
    assert steps_in(URL)[:1] == [30] and one.stored()[:1] == [30]

    taker = start(new_job("taker"), "--stop-at", "41", "--remote", URL, options=("--fast-take-over",))
    taker.wait_for("waiting", 41)
    assert taker.resumes() == [(30, "remote")] and f"taking over {URL} from {holder(one)}" in taker.text()
    assert one.wait() == 1, one.text()
    assert f"{URL} has been taken by another job, which opened history 2: {holder(taker)}" in one.text()
    taker.until(lambda: steps_in(URL)[:1] == [40], "step 40 on S3")
    end(taker)
    assert steps_in(URL)[:2] == [40, 30], "the one that was ended has published nothing more"
    assert "is not there any more" not in one.text() + taker.text()


def test_a_second_job_on_the_same_host_resumes_when_the_first_is_gone(new_job, tmp_path: Path) -> None:
    """The memory that it wants is the first one's; a third one that waits, too, ends by Ctrl-C."""
    here = tmp_path / "shared"
    one, two, three = new_job("one", here), new_job("two", here), new_job("three", here)
    start(one, "--stop-at", "37", shm="host").wait_for("waiting", 37)
    for waiting in (two, three):
        start(waiting, "--stop-at", "38", shm="host")
        line = "waiting, for up to 60 s, for " + holder(one)
        waiting.until(lambda job=waiting, line=line: line in job.text(), "it says whom it waits for")
    assert end(three, signal.SIGINT) != 0 and "PlaceInUse" not in three.text()
    end(one)
    two.wait_for("waiting", 38)
    assert two.resumes() == [(36, "storage")]
    assert two.text().count("waiting, for") == 1
    end(two)
    assert two.stored()[:1] == [38], two.text()


@pytest.mark.parametrize("how", [pytest.param("trains", marks=pytest.mark.campaign), "stands still"])
def test_a_job_on_the_same_host_is_superseded_and_its_memory_resumed(new_job, how: str, tmp_path: Path) -> None:
    """An agent that runs stops its workers and lets go; one that does not is killed."""
    here = tmp_path / "shared"
    one, taker = new_job("one", here), new_job("taker", here)
    start(one, "--stop-at", "37", shm="host").wait_for("waiting", 37)
    if how == "stands still":
        one.send(signal.SIGSTOP)
    start(taker, "--stop-at", "39", shm="host", options=("--fast-take-over",)).wait_for("waiting", 39)
    assert taker.resumes() == [(36, "memory")], taker.text()
    assert f"taking over {here} from {holder(one)}" in taker.text()
    assert one.wait() == (1 if how == "trains" else -signal.SIGKILL), one.text()
    if how == "trains":
        assert f"{here} has been taken by another job, which opened history 2: {holder(taker)}" in one.text()
        [said] = report([read(path) for path in find(here)]).superseded
        assert (said.place, said.history) == (str(here), 2) and said.holder.startswith(holder(taker))
    else:
        assert f"killed {holder(one)}" in taker.text()
    end(taker)
    assert taker.stored()[:1] == [38], taker.text()


def test_workers_restart_from_a_step_that_became_durable_since_they_began(
    new_job, uninterrupted, tmp_path: Path
) -> None:
    """Another job stood still before a rename, and reported the step before anybody had opened a newer history."""
    job = new_job()
    job.start("--stop-at", "41")
    job.wait_for_all(41)
    job.until(lambda: job.persisted(40), "step 40 durable")
    end(job)
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
