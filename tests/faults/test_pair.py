"""Two checkpointers of one job resume the same step, wherever between their saves it is killed."""

import json
import shutil
from pathlib import Path

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.jobs import Job
from tests.faults.pair import KILLS, LAST


def resumed(job: Job) -> list[list[dict[str, int]]]:
    """What each rank resumed, start after start."""
    return [[json.loads(line) for line in (job.folder / f"{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]


def newest(directory: Path) -> int:
    return CheckpointDirectory(directory).checkpoints()[0].id.step


def test_two_checkpointers_killed_between_saves_resume_one_step_or_raise_an_error(new_job):
    job = new_job().run(program="pair.py", restarts=len(KILLS))
    expected = [{"actor": -1, "critic": -1}, *({"actor": step - 1, "critic": step - 1} for step in KILLS)]
    assert resumed(job) == [expected] * 2, job.text()
    assert all(f"is passed over for step {step - 1}" in job.text() for step in KILLS)
    assert "goes on from" not in job.text()
    assert [newest(job.checkpoint_dir / name) for name in ("actor", "critic")] == [LAST, LAST]

    # All that the critic has of the last steps is lost, and all that the actor has of those before.
    critic = job.checkpoint_dir / "critic"
    for step in (15, 20):
        shutil.rmtree(critic / f"checkpoint-{step}")
    for place in (job.checkpoint_dir / "actor").glob("checkpoint-*"):
        if place.name != f"checkpoint-{LAST}":
            shutil.rmtree(place)
    left = newest(critic)
    job.run(program="pair.py")
    assert resumed(job)[0][-1] == {"actor": LAST, "critic": left}
    error = next(line for line in job.text().splitlines() if "goes on from" in line)
    assert f"{critic} goes on from step {left}" in error
    assert f"{job.checkpoint_dir / 'actor'}, which was saved in step with it, from step {LAST}" in error
