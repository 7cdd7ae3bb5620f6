"""`fastckpt.Checkpointer` in real jobs: the very same results after kills, and each sample once in any world."""

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.jobs import Job

SAMPLES, BATCH, EPOCHS = 96, 4, 2
STEPS = EPOCHS * SAMPLES // (2 * BATCH)


@pytest.fixture
def reference(uninterrupted: Callable[..., Job]) -> Job:
    return uninterrupted(program="loop.py")


def steps_of(job: Job) -> list[int]:
    """What each start of rank 0 went on from."""
    return [line["loaded"] for line in job.log(0) if "loaded" in line]


def committed(job: Job) -> dict[int, list[list[int]]]:
    """By epoch, the samples that ranks used in the steps that count: those that no later start went back behind."""
    found: dict[int, list[list[int]]] = {}
    for rank in job.ranks():
        starts: list[list[dict]] = []
        for line in job.log(rank):
            starts.append([]) if "loaded" in line else starts[-1].append(line)
        launches = [line["start"] for line in job.log(rank) if "loaded" in line]
        for start, lines in zip(launches, starts, strict=True):
            after = [l["loaded"] for l in job.log(0) if "loaded" in l and l["start"][0] > start[0]]  # noqa: E741
            for line in lines:
                if line["step"] <= min(after, default=line["step"]):
                    found.setdefault(line["epoch"], []).append(line["samples"])
    return found


@pytest.mark.parametrize("every", [("--every", "2", "6"), ()], ids=["fixed", "auto"])
def test_kills(new_job, reference, every):
    """The name is short: loader workers make sockets in the folder of the job, whose names have an end."""
    job = new_job().start(*every, "--loader-workers", "1", program="loop.py", restarts=3)
    job.wait_for("step", 9)
    job.strike(1)
    job.until(lambda: len(steps_of(job)) == 2, "a second start")
    job.wait_for("step", STEPS // 2 + 5)
    job.strike(0)
    assert job.wait() == 0, job.text()
    assert job.ends() == reference.ends(), job.text()
    for rank in (0, 1):
        assert job.losses(rank) == reference.losses(rank), job.text()
    assert len(steps_of(job)) == 3
    assert steps_of(job)[1] > 0 or not every, job.text()


def test_the_ends_of_epochs_and_of_the_job_are_kept(reference):
    assert reference.stored()[0] == STEPS
    assert STEPS // EPOCHS in reference.stored()


def test_each_sample_counts_once_in_any_world(new_job):
    job = new_job()
    for ranks, stop in ((2, 7), (1, 15), (3, 18)):
        script = ("--every", "1", "2", "--stop-at", str(stop))
        job.start(*script, ranks=ranks, program="loop.py", restarts=0)
        for rank in range(ranks):
            job.wait_for("step", stop, rank)
        job.strike("agent", *range(ranks))
        assert job.wait() == -signal.SIGKILL
    job.run("--every", "1", "2", program="loop.py")
    for epoch, batches in committed(job).items():
        counted = Counter(sample for batch in batches for sample in batch)
        assert set(counted) == set(range(SAMPLES)), epoch
        assert sum(counted.values()) < SAMPLES + 3, epoch


def test_what_it_chose_is_in_the_event_log(tmp_path: Path, new_job):
    events = tmp_path / "events"
    job = new_job().run("--epochs", "40", program="loop.py", FASTCKPT_EVENTS=str(events))
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    chosen = [line for line in lines if line["event"] == "frequency"]
    assert chosen, job.text()
    by_step: dict[int, set[tuple[int, int]]] = {}
    for line in chosen:
        by_step.setdefault(line["step"], set()).add((line["memory"], line["storage"]))
    assert all(len(intervals) == 1 for intervals in by_step.values()), "ranks differ"
