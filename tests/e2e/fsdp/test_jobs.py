"""Real jobs: ranks die, the world and the sharding change; the state is the very same, and plain torch reads it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.fsdp.conftest import PROGRAM
from tests.faults.faults import kill, kill_agent
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened

SAVING = ("snapshot.shards", "snapshot.skeleton", "snapshot.fill", "snapshot.commit", "snapshot.notify")
OPTIONS = {"program": PROGRAM, "FASTCKPT_PRELOAD": "auto"}


def survived(job: Job, reference: Job, gathers: bool = False) -> None:
    """``gathers`` says that torch makes collectives to get the state, such as for FSDP1."""
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, reference)
    assert gathers or {line.get("collectives", 0) for rank in (0, 1) for line in job.log(rank)} == {0}
    assert job.stored()


def test_an_fsdp_job_whose_rank_is_killed_in_a_save_resumes_bit_for_bit(new_job, uninterrupted):
    job = new_job().with_faults(kill(0, at="snapshot.fill", step=6), kill(1, at="overlap.commit", step=14))
    survived(job.run("--overlap", "--wait", **OPTIONS), uninterrupted())
    assert [step for step, _ in job.resumes()] == [0, 4, 12]
    assert {tier for _, tier in job.resumes()} == {"", "memory"}
    assert {8, 10, 20} <= {line["pending"] for line in job.log(1) if "pending" in line}, "copied in the background"


def test_a_full_state_of_fsdp1_resumes_after_a_kill(new_job, uninterrupted):
    """torch ends processes with a signal if it is to bring to the processor what FSDP1 has there."""
    job = new_job().with_faults(kill(1, at="snapshot.fill", step=6))
    survived(job.run("--way", "full1", **OPTIONS), uninterrupted(), gathers=True)


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["fsdp2", "fsdp1", "tp", "full"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_fsdp_job_with_each_rank_killed_in_each_phase_resumes_bit_for_bit(new_job, uninterrupted, way, rank):
    script = ("--way", way, "--steps", "60")
    phases = SAVING if way != "full" else SAVING[1:]
    kills = [kill(rank, at="snapshot.plan", step=2)] if way != "full" else []
    kills += [kill(rank, at=phase, step=6 + 8 * i) for i, phase in enumerate(phases)]
    kills += [kill(rank, at="resume.verify"), kill(rank, at="resume.load")]
    job = new_job().with_faults(*kills).run(*script, **OPTIONS)
    survived(job, uninterrupted(*script), gathers=way in ("fsdp1", "full"))


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["fsdp2", "full"])
def test_an_fsdp_job_killed_in_the_middle_of_a_persist_resumes_bit_for_bit(new_job, uninterrupted, way):
    """Of the ranks each time one, of the agents all but the last."""
    script = ("--way", way, "--steps", "60")
    phases = ("persist.write", "persist.manifest", "persist.rename", "persist.tracker")
    kills = [kill(i % 2, at=phase, step=6 + 6 * i) for i, phase in enumerate(phases)]
    kills += [kill_agent(at=phase, step=32 + 6 * i) for i, phase in enumerate(phases)]
    job = new_job().with_faults(*kills).run_to_the_end(*script, "--disk", "4", **OPTIONS)
    survived(job, uninterrupted(*script), gathers=way == "full")
    assert {tier for _, tier in job.resumes()} == {"", "memory"}, job.text()


@pytest.mark.campaign
def test_an_fsdp_job_whose_rank_is_killed_in_a_background_copy_resumes(new_job, uninterrupted):
    phases = ("overlap.copy", "overlap.compare", "overlap.commit", "overlap.notify", "overlap.wait")
    kills = [kill(i % 2, at=phase, step=6 + 8 * i) for i, phase in enumerate(phases)]
    survived(new_job().with_faults(*kills).run("--overlap", "--steps", "60", **OPTIONS), uninterrupted("--steps", "60"))


def test_an_fsdp_job_whose_state_changes_its_structure_resumes(new_job):
    """In all ranks at once, and in the one that writes a value which outgrows its place."""
    job = new_job().with_faults(kill(1, at="snapshot.fill", step=19))
    job.run("--widen-at", "9", "--text", "150", "--memory", "1", "--disk", "4", "--wait", **OPTIONS)
    assert all(len(losses) == 1 for rank in (0, 1) for losses in job.losses(rank).values()), job.text()
    assert job.resumes()[1][1] == "memory"
    lines = [line for rank in (0, 1) for line in job.log(rank)]
    changed = {line["skipped"] for line in lines if "structure" in line.get("reason", "")}
    assert len(changed) > 1 and not any(step % 4 == 0 for step in changed), "to DISK ranks save together"
    assert not {step + 1 for step in changed} & changed, "the ranks have planned again"
    persisted = [{line["saved"] for line in job.log(rank) if line.get("saved", 1) % 4 == 0} for rank in (0, 1)]
    assert persisted[0] == persisted[1] and persisted[0] <= set(job.stored())


CHAIN = ("--full", "--memory", "1", "--disk", "3")


def go(job: Job, way: str, ranks: int, steps: int, die: bool = False) -> dict[str, object]:
    """Launch it in another shape; what its ranks have loaded."""
    code = job.start(*CHAIN, "--way", way, "--steps", str(steps), *(["--die"] * die), ranks=ranks, **OPTIONS).wait()
    assert code == (-signal.SIGKILL if die else 0), job.text()
    lines = [line for rank in range(ranks) for line in job.log(rank) if line.get("start") == [job.launches, 0]]
    loaded = [{name: line.get(name) for name in ("world", "loaded", "tier", "equal")} for line in lines]
    assert len(loaded) == ranks and all(each == loaded[0] for each in loaded), loaded
    return loaded[0]


def test_an_fsdp_job_resumes_with_other_ranks_and_another_sharding(new_job):
    job = new_job()
    go(job, "fsdp2", 2, steps=4, die=True)
    # The next launch adopts what memory holds.
    assert go(job, "tp", 3, steps=7) == {"world": 3, "loaded": 4, "tier": "memory", "equal": True}
    command = [sys.executable, "-m", "tests.e2e.fsdp.stock", str(job.folder)]
    stock = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=Path(__file__).parents[3]
    )
    assert stock.returncode == 0, stock.stderr
    found = {int(line.split()[0]): line.split()[1:] for line in stock.stdout.splitlines()}
    assert found.keys() >= {6, 7}
    files = [f"__{rank}_0.distcp" for rank in range(3)] + ["manifest.json"] + [f"rank_{rank}.pt" for rank in range(3)]
    assert found[7] == [".metadata", *files]


WAYS = [
    ("fsdp2", 2),
    ("fsdp2", 4),
    ("fsdp2", 3),
    ("hsdp", 4),
    ("2d", 4),
    ("tp", 2),
    ("fsdp1", 2),
    ("tp", 4),
    ("fsdp1", 4),
]


@pytest.mark.campaign
@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_an_fsdp_job_resumes_from_each_sharding_in_each_other(new_job, tier):
    """A tour in which each change of world size and way comes, there and back."""
    job, step = new_job(), 0
    tour = [*WAYS, *reversed(WAYS), ("hsdp", 4), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 4), ("hsdp", 4), ("tp", 2)]
    for number, (way, ranks) in enumerate(tour):
        loaded = go(job, way, ranks, steps=step + 3, die=tier == "memory")
        if number:
            assert loaded == {"world": ranks, "loaded": step, "tier": tier, "equal": True}, (way, ranks)
        step += 3
    if tier == "memory":
        go(job, "fsdp2", 2, steps=step)


@pytest.mark.campaign
def test_an_fsdp_job_restarted_after_a_rollback_resumes_what_was_saved_since(new_job):
    """Restarted workers ask for the same step again; later saves are newer. Another launch goes back again."""
    job = new_job().run("--steps", "12", "--disk", "2", **OPTIONS)
    job.with_faults(kill(1, at="snapshot.fill", step=10))
    for _ in range(2):
        job.run("--steps", "14", "--resume-path", str(job.checkpoint_dir / "checkpoint-4"), **OPTIONS)
    assert [step for step, _ in job.resumes()] == [0, 4, 8, 4]
    assert all(len(losses) == 1 for rank in (0, 1) for losses in job.losses(rank).values()), job.text()
