"""Jobs of frameworks that go on from what stock ones have saved, from a path, or with damaged memory."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import FRAMEWORKS, Jobs
from tests.faults.faults import delay, flip, kill, remove
from tests.faults.jobs import HERE, Job, assert_all_injected, run_without_fastckpt
from tests.faults.table import ACCELERATE, FOLDER, LIGHTNING, STOCK, TRAINER

pytestmark = [pytest.mark.frameworks, pytest.mark.campaign]


@pytest.fixture
def run(new_job: Jobs) -> Callable[..., Job]:
    """Runs a program of a framework to its good end, in a job of this name."""

    def run(program: str, *script: object, job: Job | None = None, **options: Any) -> Job:
        return (job or new_job()).run(*map(str, script), program=program, **FRAMEWORKS, **options)

    return run


@pytest.fixture
def plain(uninterrupted) -> Callable[..., Job]:
    return lambda program, *script: uninterrupted(*script, program=program, **FRAMEWORKS)


@pytest.mark.parametrize(
    ("program", "way"),
    [(LIGHTNING, ""), *((ACCELERATE, way) for way in ("", "stateful", "hooks", "bin"))],
)
def test_a_stock_framework_and_fastckpt_resume_from_each_other(tmp_path, run, plain, program, way) -> None:
    """It goes on from what we saved, and we from what it saves then: all is as if we alone had trained."""
    script = ("--way", way) if way else ()
    name, other = ("step=10.ckpt", "stock.ckpt") if program == LIGHTNING else ("checkpoint-10", "stock")
    ours, framework = (
        plain(program, *script).checkpoint_dir / name,
        "lightning" if program == LIGHTNING else "accelerate",
    )
    stock = HERE.parent / f"e2e/{framework}/stock.py"
    options = [f"--{way}"] if way in ("stateful", "hooks") else []
    run_without_fastckpt(tmp_path, stock, ours, tmp_path / other, "--steps", 14, *options)
    job = run(program, "--resume-path", tmp_path / other, *script)
    assert job.ends() == plain(program, *script).ends(), job.text()


def test_a_stock_trainer_and_fastckpt_resume_from_each_other(new_job, run, uninterrupted) -> None:
    """In each direction the very losses, with True as with a path."""
    reference = uninterrupted("--resume", "none", program=STOCK, **FRAMEWORKS)
    ours = run(TRAINER)
    torchrun = {"launcher": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")}
    for name, source, program, options in (("stock", ours, STOCK, torchrun), ("fast", reference, TRAINER, {})):
        job = new_job(name)
        copy = job.checkpoint_dir / "checkpoint-10"
        shutil.copytree(source.checkpoint_dir / copy.name, copy)
        run(program, "--resume", copy if name == "stock" else "True", job=job, **options)
        assert job.ends() == reference.ends()
        for rank in (0, 1):
            assert job.losses(rank) == {s: loss for s, loss in reference.losses(rank).items() if s > 10}


@pytest.mark.parametrize(
    ("program", "way", "place"), [(LIGHTNING, "", "step=10.ckpt"), (ACCELERATE, "named", "step_10")]
)
def test_a_job_goes_back_to_a_checkpoint_by_its_path(run, plain, program, way, place) -> None:
    """Restarted workers go on from what was saved since."""
    job = run(program, "--way", way)
    job.with_faults(kill(1, at="snapshot.fill", step=16))
    run(program, "--way", way, "--resume-path", job.checkpoint_dir / place, job=job)
    assert [step for step, _ in job.resumes()] == [0, 10, 14]
    assert job.ends() == plain(program).ends()


@pytest.mark.parametrize("harm", [remove, flip])
@pytest.mark.parametrize("name", ["model.safetensors", "random/1.pt", "optimizer/first.pt"])
def test_damaged_memory_of_framework_files_falls_back_to_storage(new_job, uninterrupted, harm, name) -> None:
    """Each step is on storage, and memory has digests: it is found before a rank reads it, or by the one that does."""
    job = new_job().with_faults(
        delay(0, at="snapshot.skeleton", step=16),  # the faults that follow are not injected before
        harm(name, 0, at="snapshot.fill", saved=14),
        kill(0, at="snapshot.commit", step=16),
    )
    job.run("--disk", "2", "--wait", program=FOLDER)
    assert_all_injected(job)
    assert job.ends() == uninterrupted("--disk", "2", "--wait", program=FOLDER).ends(), job.text()
    assert job.resumes()[1] == (14, "storage"), job.text()
