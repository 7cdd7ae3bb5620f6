"""Real jobs with DeepSpeed: ranks die, and training continues as if nothing had happened."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.deepspeed.conftest import KINDS, OPTIONS
from tests.faults.faults import delay, kill, kill_agent, kill_all
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.nodes import Nodes
from tests.support.live_folders import remove_live

pytestmark = pytest.mark.frameworks

SAVING = ("snapshot.engine", "snapshot.skeleton", "snapshot.fill", "snapshot.commit", "snapshot.notify")


def survived(job: Job, reference: Job, interval: int = 2) -> None:
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, reference, interval=interval)
    assert job.stored()


def test_a_deepspeed_job_resumes_after_ranks_and_the_agent_are_killed(new_job, uninterrupted):
    """While a save is made, while it is copied in the background, and when it is done."""
    script = ("--dtype", "bf16")
    job = new_job().with_faults(
        kill(0, at="snapshot.fill", step=6),
        kill(1, at="overlap.copy", step=14),
        kill_agent(at="overlap.notify", step=20),
    )
    survived(job.run_to_the_end("--overlap", *script, **OPTIONS), uninterrupted(*script), interval=4)
    steps = [step for step, _ in job.resumes()]
    assert steps[:3] == [0, 4, 12] and steps[3:] in ([18], [20]), "20 counts once both ranks have copied it"
    assert {tier for _, tier in job.resumes()} == {"", "memory"}
    assert {10, 18} <= {line["pending"] for line in job.log(1) if "pending" in line}, "copied in the background"
    assert (job.checkpoint_dir / "latest").read_text() == f"global_step{job.stored()[0]}" == "global_step24"


@pytest.mark.campaign
@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_a_deepspeed_job_that_lost_its_memory_resumes_from_storage(new_job, uninterrupted, stage, dtype):
    """The agent dies with its workers, and memory is lost."""
    script = ("--stage", str(stage), "--dtype", dtype)
    # step 10 is durable by then
    job = new_job().with_faults(delay(3, at="snapshot.fill", step=12), kill_all(at="snapshot.fill", step=16))
    assert job.start(*script, **OPTIONS).wait() == -signal.SIGKILL
    remove_live(job.arena())
    job.run(*script, **OPTIONS)
    assert_all_injected(job)
    assert job.ends() == uninterrupted(*script).ends()
    assert all(job.losses(rank) == uninterrupted(*script).losses(rank) for rank in (0, 1))
    assert job.resumes()[1] == (10, "storage")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "job")
    yield made
    made.end()


@pytest.mark.campaign
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_deepspeed_job_on_two_nodes_resumes_after_a_worker_dies(nodes, uninterrupted, stage):
    """Below stage 3 only the first node has written the model: the other keeps a copy of so small a file."""
    nodes.job.with_faults(kill(1, at="snapshot.fill", step=16))
    nodes.run("--stage", str(stage), **OPTIONS)
    assert_as_if_nothing_had_happened(nodes.job, uninterrupted("--stage", str(stage)))
    assert nodes.resumes() == [((0, ""), (0, "")), ((14, "memory"), (14, "memory"))]


@pytest.mark.campaign
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_deepspeed_job_goes_on_from_memory_when_a_node_loses_its_own(nodes, uninterrupted, stage, lost):
    script = ("--stage", str(stage), "--steps", "200")
    nodes.start(*script, **OPTIONS)
    nodes.job.process = nodes.agents[0].process
    for rank in (0, 1):
        nodes.job.wait_for("saved", 16, rank)
    nodes.agents[lost].kill_processes("agent")
    nodes.wait_for_death(lost)
    remove_live(nodes.shm(lost))
    nodes.start(*script, nodes=[lost], **OPTIONS)
    assert nodes.wait() == [0, 0], nodes.text()
    found = nodes.resumes()[1]
    assert found[lost][1] == "peer" and found[1 - lost][1] == "memory" and found[0][0] == found[1][0] >= 14
    assert nodes.job.ends() == uninterrupted(*script).ends()
    assert all(nodes.job.losses(rank) == uninterrupted(*script).losses(rank) for rank in (0, 1))


@pytest.mark.campaign
@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_a_deepspeed_job_resumes_after_kills_in_each_phase_of_a_save_and_a_load(new_job, uninterrupted, stage, dtype):
    script = ("--stage", str(stage), "--dtype", dtype, "--steps", "60")
    kills = [kill(i % 2, at=phase, step=6 + 8 * i) for i, phase in enumerate(SAVING)]
    kills += [kill(1, at="resume.verify"), kill(0, at="resume.load")]
    job = new_job().with_faults(*kills).run(*script, **OPTIONS)
    survived(job, uninterrupted(*script))
    assert {tier for _, tier in job.resumes()} == {"", "memory"}


@pytest.mark.campaign
@pytest.mark.parametrize(("stage", "dtype"), KINDS)
def test_a_deepspeed_job_resumes_after_kills_during_background_copies(new_job, uninterrupted, stage, dtype):
    phases = ("overlap.copy", "overlap.compare", "overlap.commit", "overlap.notify", "overlap.wait")
    ranks = 2 if stage else 1  # without ZeRO only the first saves what the optimizer changes
    kills = [kill(i % ranks, at=phase, step=6 + 8 * i) for i, phase in enumerate(phases)]
    script = ("--stage", str(stage), "--dtype", dtype, "--steps", "60")
    job = new_job().with_faults(*kills).run("--overlap", *script, FASTCKPT_CHECK_OVERLAP="1", **OPTIONS)
    survived(job, uninterrupted(*script), interval=4)  # steps are done while a save is pending
    assert len({line["pending"] for line in job.log(0) if "pending" in line}) > 10, "copied in the background"
