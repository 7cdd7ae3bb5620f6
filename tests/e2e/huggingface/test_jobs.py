"""Real jobs of a Trainer under fastckpt-run: ranks and agents die, as if nothing had happened."""

import shutil

import pytest

from tests.e2e.huggingface.conftest import OPTIONS, run_stock
from tests.e2e.huggingface.test_files import names
from tests.faults.faults import kill, kill_agent
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.nodes import Nodes

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]


def survived(job: Job, reference: Job) -> None:
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, reference)


def test_a_trainer_job_with_ddp_resumes_after_kills_in_memory_and_storage(new_job, uninterrupted):
    """One rank in a save to memory, the other as a checkpoint gets its name on storage, and the agent."""
    job = new_job().with_faults(
        kill(0, at="snapshot.fill", step=6),
        kill(1, at="persist.rename", step=10),
        kill_agent(at="snapshot.fill", step=16),
    )
    survived(job.run_to_the_end("--wait", **OPTIONS), uninterrupted())
    assert job.resumes() == [(0, ""), (4, "memory"), (10, "memory"), (14, "memory")]


WAYS = {
    "fsdp2": ["--way", "fsdp2"],
    "fsdp2-full": ["--way", "fsdp2-full"],
    "lora": ["--way", "lora"],
    "overlap": ["--overlap"],
    "own": ["--kind", "own"],
    "accumulation": ["--accumulate", "2"],
    "log": ["--set", "logging_steps=5"],
    "epochs": ["--set", 'save_strategy="epoch"'],
    **{f"zero{stage}": ["--way", "deepspeed", "--stage", f"{stage}"] for stage in (1, 2, 3)},
}


@pytest.mark.campaign
@pytest.mark.parametrize("way", WAYS)
def test_each_kind_of_trainer_job_resumes_after_kills_in_each_phase(new_job, uninterrupted, way):
    job = new_job().with_faults(kill(1, at="snapshot.fill", step=6), kill(0, at="snapshot.fill", step=15))
    job.run(*WAYS[way], **OPTIONS)
    survived(job, uninterrupted(*WAYS[way][: 4 if way != "own" else 0]))
    assert {tier for _, tier in job.resumes()[1:]} == {"memory"}
    assert any("pending" in line for line in job.log(0)) == (way == "overlap"), "copied in the background"


@pytest.mark.campaign
def test_stock_trainer_and_fastckpt_resume_from_each_other(new_job, uninterrupted):
    """In each direction the very losses, with True as with a path."""
    reference, ours = uninterrupted(), new_job("ours").run(**OPTIONS)
    for name, source, run, resume in (
        ("stock", ours, run_stock, "path"),
        ("fast", reference, lambda job, *script: job.run(*script, **OPTIONS), "True"),
    ):
        job = new_job(name)
        shutil.copytree(source.checkpoint_dir / "checkpoint-10", job.checkpoint_dir / "checkpoint-10")
        run(job, "--resume", str(job.checkpoint_dir / "checkpoint-10") if resume == "path" else resume)
        assert job.ends() == reference.ends()
        for rank in (0, 1):
            assert job.losses(rank) == {s: loss for s, loss in reference.losses(rank).items() if s > 10}


BEST = [
    *("--eval", "4", "--disk", "4", "--memory", "1", "--set"),
    *("load_best_model_at_end=true", 'metric_for_best_model="loss"', "greater_is_better=false"),
]


@pytest.mark.campaign
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_trainer_job_keeps_and_loads_the_best_model_after_kills(new_job, uninterrupted, limit):
    script = [*BEST, f"save_total_limit={limit}"]
    reference = uninterrupted(*script)
    job = new_job().with_faults(kill(0, at="snapshot.fill", step=10), kill(1, at="snapshot.fill", step=19))
    survived(job.run(*script, **OPTIONS), reference)
    kept = {path.name for path in job.checkpoint_dir.glob("checkpoint-*")}
    assert kept == {path.name for path in reference.checkpoint_dir.glob("checkpoint-*")}
    assert job.log(0)[-1] == reference.log(0)[-1]


def test_save_only_model_keeps_the_optimizer_in_memory_and_warns_from_storage(new_job, uninterrupted):
    """A restart loses nothing; what goes on from storage alone is told that its optimizer is new."""
    job = new_job().with_faults(kill(0, at="snapshot.fill", step=12))
    job.run("--set", "save_only_model=true", "save_total_limit=1", **OPTIONS)
    survived(job, uninterrupted())
    assert [step for step, _ in job.resumes()] == [0, 10]
    assert job.stored() == [24]
    assert not [*job.checkpoint_dir.glob("checkpoint-24/optimizer*")]
    job.run("--set", "save_only_model=true", **OPTIONS)
    assert "step 24 has the model alone" in job.text()


@pytest.mark.campaign
def test_a_trainer_job_resumes_with_another_number_of_ranks(new_job):
    job = new_job()
    job.run("--steps", "6", **OPTIONS)
    job.run("--steps", "12", ranks=1, **OPTIONS)
    assert [step for step, _ in job.resumes()] == [0, 6]


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_trainer_job_on_two_nodes_resumes_after_kills(tmp_path, uninterrupted, way):
    """Of DDP each node has all that its rank needs; of shards it keeps copies of those of the other."""
    nodes = Nodes(tmp_path / "job")
    nodes.job.with_faults(kill(rank=1, at="snapshot.fill", step=16))
    try:
        nodes.run("--way", way, "--eval", "6", **OPTIONS)
    finally:
        nodes.end()
    reference = uninterrupted("--way", way, "--eval", "6")
    assert nodes.job.ends() == reference.ends(), nodes.text()
    assert [nodes.job.losses(rank) for rank in (0, 1)] == [reference.losses(rank) for rank in (0, 1)]
    assert nodes.resumes() == [((0, ""), (0, "")), ((14, "memory"), (14, "memory"))]
    theirs = reference.checkpoint_dir / "checkpoint-20"
    assert names(nodes.job.checkpoint_dir / "checkpoint-20") == names(theirs)


@pytest.mark.campaign
def test_get_last_checkpoint_names_the_newest_before_a_trainer_exists(new_job, uninterrupted):
    """The checkpoint of get_last_checkpoint is in memory alone after both ranks and the agent were killed."""
    job = new_job()
    job.start("--kill-after", "5", "--memory", "1", "--resume", "last", **OPTIONS).wait()
    assert not [*job.checkpoint_dir.glob("checkpoint-*")]
    job.run("--resume", "last", **OPTIONS)
    assert job.resumes() == [(0, ""), (5, "memory")]
    survived(job, uninterrupted())
