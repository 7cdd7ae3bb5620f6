"""Jobs of a Trainer that saves in its own ways: what it keeps, and finds, after kills."""

import signal

import pytest

from tests.faults.conftest import FRAMEWORKS, new_job, uninterrupted  # noqa: F401 (fixtures)
from tests.faults.faults import kill
from tests.faults.jobs import assert_all_injected, assert_as_if_nothing_had_happened
from tests.faults.table import STOCK, TRAINER

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]
OPTIONS = {"program": TRAINER, "FASTCKPT_PRELOAD": "auto", **FRAMEWORKS}


def test_save_only_model_keeps_the_optimizer_in_memory_and_warns_from_storage(new_job, uninterrupted):  # noqa: F811
    """A restart loses nothing; what goes on from storage alone is told that its optimizer is new."""
    job = new_job().with_faults(kill(0, at="snapshot.fill", step=12))
    job.run("--set", "save_only_model=true", "save_total_limit=1", **OPTIONS)
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted("--resume", "none", program=STOCK, **FRAMEWORKS))
    assert [step for step, _ in job.resumes()] == [0, 10]
    assert job.stored() == [24]
    assert not [*job.checkpoint_dir.glob("checkpoint-24/optimizer*")]
    job.run("--set", "save_only_model=true", **OPTIONS)
    assert "step 24 has the model alone" in job.text()


@pytest.mark.campaign
def test_a_trainer_goes_on_with_other_ranks_and_from_the_checkpoint_that_it_is_named(new_job):  # noqa: F811
    """get_last_checkpoint finds what is in memory alone, after both ranks and the agent were killed."""
    job = new_job()
    script = ("--kill-after", "5", "--memory", "1", "--resume", "last")
    assert job.start(*script, **OPTIONS).wait() == -signal.SIGKILL
    assert not [*job.checkpoint_dir.glob("checkpoint-*")]
    job.run("--resume", "last", "--steps", "10", **OPTIONS)
    job.run("--steps", "12", ranks=1, **OPTIONS)
    assert job.resumes() == [(0, ""), (5, "memory"), (10, "storage")]
