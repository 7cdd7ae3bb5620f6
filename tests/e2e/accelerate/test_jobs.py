"""Real jobs with accelerate: kills of ranks and agents, and turns with stock code, leave results bit-equal."""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.accelerate.conftest import OPTIONS, run_stock
from tests.faults.faults import kill, kill_agent
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened, launcher_for
from tests.support import launchers

pytestmark = pytest.mark.frameworks

FILES = {
    "model.safetensors",
    "optimizer.bin",
    "scheduler.bin",
    "custom_checkpoint_0.pkl",
    "epochs.json",
    "random_states_0.pkl",
    "random_states_1.pkl",
}


def test_an_accelerate_job_resumes_after_a_rank_and_then_the_agent_are_killed(new_job, uninterrupted):
    job = new_job().with_faults(kill(1, at="snapshot.fill", step=6), kill_agent(at="snapshot.commit", step=18))
    job.run_to_the_end("--wait", **OPTIONS)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted())
    assert [step for step, _ in job.resumes()][:2] == [0, 4]
    assert {tier for _, tier in job.resumes()} == {"", "memory"}
    (newest, *_) = job.stored()
    assert {path.name for path in (job.checkpoint_dir / f"checkpoint-{newest}").iterdir()} == FILES | {"manifest.json"}


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["", "--stateful", "--hooks", "--bin"])
def test_stock_accelerate_and_fastckpt_resume_from_each_other(tmp_path, uninterrupted, way):
    """accelerate goes on from what we saved, and we from what it saves then: all is as if we alone had trained."""
    stock, script = tmp_path / "stock", [way] if way else []
    ours = uninterrupted(*script).checkpoint_dir / "checkpoint-10"
    run_stock(tmp_path, ours, stock, "--steps", 14, *[each for each in script if each != "--bin"])
    other = Job(tmp_path / "job").run("--resume-path", str(stock), *script, **OPTIONS)
    assert other.ends() == uninterrupted(*script).ends(), other.text()
    assert [line["said"] for line in other.log(1) if "said" in line] == [-1]


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", ["", "--stateful", "--overlap", "--hooks", "--bin", "--named"])
def test_each_kind_of_accelerate_job_resumes_after_kills_in_each_phase(new_job, uninterrupted, way, rank):
    stage = "overlap" if way == "--overlap" and rank == 0 else "snapshot"  # what others have is never deferred
    phases = ("snapshot.fill", f"{stage}.commit", f"{stage}.notify")
    kills = [kill(rank, at=phase, step=10 + 4 * i) for i, phase in enumerate(phases)]
    kills += [kill(rank, at="resume.verify"), kill(rank, at="resume.load")]
    script = [way] if way else []
    job = new_job().with_faults(*kills).run(*script, **OPTIONS)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(*script))


def test_a_loop_whose_loader_counts_epochs_resumes_in_the_same_order(tmp_path, forked_launchers):
    """The order of the epoch that was interrupted, and those of later ones, are as without the kill."""

    def used(name: str, *arguments: str) -> dict[int, set[str]]:
        launcher = (*launcher_for(tmp_path), "--nproc_per_node=2", "--max-restarts=2")
        program, output = str(Path(__file__).with_name("epochs.py")), tmp_path / f"output-{name}"
        variables = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "FASTCKPT_PRELOAD": "accelerate"}
        with output.open("wb") as file:
            job = launchers.start([*launcher, program, str(tmp_path / name), *arguments], variables, file.fileno())
        code, text = job.wait(240), output.read_text()
        assert code == 0, text
        assert text.count("restarts left") == len(arguments) - 1, text
        assert "no epochs of data loaders" not in text
        return {rank: set((tmp_path / name / f"used.{rank}").read_text().splitlines()) for rank in (0, 1)}

    undisturbed = used("undisturbed", "skip")
    assert len({line.split(maxsplit=2)[2] for lines in undisturbed.values() for line in lines}) == 30, "orders differ"
    assert used("skip", "skip", "dies") == undisturbed
    assert used("stateful", "stateful", "dies") == undisturbed


@pytest.mark.campaign
def test_an_accelerate_job_that_lost_its_memory_resumes_from_storage(new_job, uninterrupted):
    """The host is another one: what is durable goes on."""
    job = new_job()
    assert job.start("--steps", "13", "--die", **OPTIONS).wait() == -9, job.text()
    for path in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():
        os.system(f"rm -rf {path}")
    job.run(**OPTIONS)
    assert job.resumes() == [(0, ""), (10, "storage")]
    assert job.ends() == uninterrupted().ends()


@pytest.mark.campaign
def test_an_accelerate_job_goes_back_to_a_checkpoint_by_name(new_job, uninterrupted):
    job = new_job().run("--named", **OPTIONS)
    back = str(job.checkpoint_dir / "step_10")
    job.with_faults(kill(1, at="snapshot.fill", step=16))
    job.run("--named", "--resume-path", back, **OPTIONS)
    assert [step for step, _ in job.resumes()] == [0, 10, 14]
    assert job.ends() == uninterrupted().ends()
    weights = load_file(job.checkpoint_dir / "step_20" / "model.safetensors")
    assert "0.weight" in weights, "as accelerate names what DDP has"
