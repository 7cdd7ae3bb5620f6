"""Real jobs with Lightning: kills of ranks and agents, and turns with stock code, leave results bit-equal."""

import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.lightning.conftest import OPTIONS, run_stock
from tests.faults.faults import kill, kill_agent
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened

pytestmark = pytest.mark.frameworks


def test_a_lightning_job_resumes_after_a_rank_and_then_the_agent_are_killed(new_job, uninterrupted):
    job = new_job().with_faults(kill(1, at="snapshot.fill", step=6), kill_agent(at="snapshot.commit", step=18))
    job.run_to_the_end(**OPTIONS)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=3)
    assert [step for step, _ in job.resumes()][:2] == [0, 4]
    assert {tier for _, tier in job.resumes()} == {"", "memory"}


@pytest.mark.campaign
def test_stock_lightning_and_fastckpt_resume_from_each_other(tmp_path, uninterrupted):
    """Lightning goes on from what we saved, and we from what it saves then: all is as if we alone had trained."""
    stock = tmp_path / "stock.ckpt"
    run_stock(tmp_path, uninterrupted().checkpoint_dir / "step=10.ckpt", stock, "--steps", 14)
    other = Job(tmp_path / "job").run("--resume-path", str(stock), **OPTIONS)
    assert other.ends() == uninterrupted().ends(), other.text()


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("script", [["--way", "unseeded"], ["--overlap"], ["--memory", "1", "--way", "top"]])
def test_each_kind_of_lightning_job_resumes_after_kills_in_each_phase(new_job, uninterrupted, script, rank):
    stage = "overlap" if "--overlap" in script and rank == 0 else "snapshot"  # what others have is never deferred
    phases = ("snapshot.skeleton", "snapshot.fill", f"{stage}.commit", f"{stage}.notify")
    kills = [kill(rank, at=phase, step=5 + 4 * i) for i, phase in enumerate(phases)]
    kills += [kill(rank, at="resume.verify"), kill(rank, at="resume.load")]
    job = new_job().with_faults(*kills).run(*script, **OPTIONS)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(*script), interval=3)
    for line in job.log(0):
        if "kept" in line:
            assert line["kept"] == line["expected"]


@pytest.mark.campaign
def test_a_plain_loader_with_saves_after_validation_resumes_bit_for_bit(new_job, uninterrupted):
    """Nothing but ModelCheckpoint: the epoch's end that is durable goes on with the very same random numbers."""
    job = new_job()
    job.start("--way", "epochs", "--steps", "20", "--die", **OPTIONS)
    assert job.wait() == -9, job.text()
    for path in Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir():
        shutil.rmtree(path)
    job.run("--way", "epochs", **OPTIONS)
    assert [step for step, _ in job.resumes()] == [0, 16]
    assert job.ends() == uninterrupted("--way", "epochs").ends()


@pytest.mark.campaign
def test_a_lightning_job_goes_back_to_a_file_by_its_path(new_job, uninterrupted):
    """Restarted workers go on from what was saved since."""
    job = new_job().run(**OPTIONS)
    job.with_faults(kill(1, at="snapshot.fill", step=16))
    job.run("--resume-path", str(job.checkpoint_dir / "step=10.ckpt"), **OPTIONS)
    assert [step for step, _ in job.resumes()] == [0, 10, 14]
    assert job.ends() == uninterrupted().ends()
