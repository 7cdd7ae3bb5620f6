"""`fastckpt.Checkpointer` with sharded models in real jobs: the very same results after kills, in any world."""

import signal
from pathlib import Path

import pytest

from tests.faults.faults import kill
from tests.faults.jobs import Job, assert_all_injected
from tests.faults.test_loop import steps_of

PROGRAM = {"program": str(Path(__file__).with_name("loop.py")), "FASTCKPT_PRELOAD": "auto"}
SAMPLES, STEPS = 96, 24


@pytest.fixture
def reference(tmp_path_factory: pytest.TempPathFactory):
    """The run of so many ranks that nothing befell; made once, whoever asks first."""

    def of(*script: str, ranks: int = 2) -> Job:
        job = Job(tmp_path_factory.getbasetemp() / "-".join(["loop", str(ranks), *script]))
        return job if job.ends() else job.run(*script, ranks=ranks, **PROGRAM)

    return of


def survived(job: Job, reference: Job, steps: int = STEPS) -> None:
    assert_all_injected(job)
    assert job.ends() == reference.ends(), job.text()
    for rank in reference.ranks():
        assert job.losses(rank) == reference.losses(rank), job.text()
    assert job.stored()[0] == steps


def end_at(job: Job, step: int, *script: str, ranks: int = 2, restarts: int = 0) -> None:
    """Launch it, and kill all of it, the agent included, once it has come to a step."""
    job.start(*script, "--stop-at", str(step), ranks=ranks, restarts=restarts, **PROGRAM)
    for rank in range(ranks):
        job.wait_for("due", step, rank)
    job.kill_processes("agent", *range(ranks))
    assert job.wait() == -signal.SIGKILL


def due_since_the_last_start(job: Job, rank: int) -> list[int]:
    """What a rank had done before it was killed may be in its log alone: the other was not there yet."""
    log = job.log(rank)
    start = max(i for i, line in enumerate(log) if "loaded" in line)
    return [line["due"] for line in log[start:] if "due" in line]


def test_kills_leave_the_results_of_a_sharded_loop_unchanged(new_job, reference):
    """Of a rank, and of all; FSDP1 and FSDP2 compute the same, and go on from each other. How often it saves does
    not matter.
    """
    job = new_job().with_faults(kill(1, at="snapshot.fill", step=6), kill(0, at="overlap.commit", step=17))
    end_at(job, 12, "--way", "fsdp1", "--every", "1", "6", "--wait", restarts=1)
    job.run("--way", "fsdp2", **PROGRAM)
    survived(job, reference("--every", "1", "1000"))
    assert steps_of(job)[:2] == [0, 5] and steps_of(job)[2] in (11, 12), job.text()
    assert {tier for _, tier in job.resumes()} == {"", "memory"}
    lasts = [due_since_the_last_start(job, rank) for rank in (0, 1)]
    assert lasts[0] == lasts[1] and lasts[0], "ranks differ"


@pytest.mark.campaign
@pytest.mark.parametrize(("way", "ranks"), [("fsdp1", 2), ("tp", 2), ("2d", 4)])
def test_kills_in_each_phase_leave_the_results_of_a_sharded_loop_unchanged(new_job, reference, way, ranks):
    """Of each way to shard, a rank is killed in each phase, by turns."""
    kills = [kill(0, at="snapshot.plan", step=1)]
    for phase in ("shards", "skeleton", "fill"):
        kills.append(kill(len(kills) % ranks, at=f"snapshot.{phase}", step=4 * len(kills)))
    for phase in ("commit", "notify"):  # of the first save after a start, which is copied at once
        kills.append(kill(len(kills) % ranks, at=f"snapshot.{phase}", step=1))
    for phase in ("copy", "compare", "commit", "notify", "wait") if way != "fsdp1" else ():
        kills.append(kill(len(kills) % ranks, at=f"overlap.{phase}", step=4 * len(kills)))
    kills += [kill(1, at="resume.verify"), kill(ranks - 1, at="resume.load")]
    replicas = {"tp": 1, "2d": ranks // 2}.get(way, ranks)
    script = ("--way", way, "--samples", str(96 * replicas))
    job = new_job().with_faults(*kills).run(*script, "--every", "1", "6", ranks=ranks, **PROGRAM)
    survived(job, reference(*script, "--every", "1", "1000", ranks=ranks), 48)
