"""Workers, the agent, or all of them killed as a phase begins, and a worker in the middle of a fill."""

import pytest

from tests.faults.faults import kill, kill_agent, kill_all, kill_both
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened

SNAPSHOT = ("snapshot.skeleton", "snapshot.fill", "snapshot.commit", "snapshot.notify")
PERSIST = (
    "persist.write",
    "persist.manifest",
    "persist.retire",
    "persist.rename",
    "persist.link",
    "persist.tracker",
    "persist.drop",
)
RESUME = ("resume.verify", "resume.load")
LAUNCH = ("launch.rendezvous", "arena.adopt")


def assert_survived(job: Job, reference: Job, *, nothing_saved: int = 0) -> None:
    """By every kill, each time from memory, but for so many starts before anything was saved."""
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, reference)
    tiers = [next(iter(start.values()))[0]["tier"] for start in job.starts()]
    assert tiers == [""] * (1 + nothing_saved) + ["memory"] * (len(tiers) - 1 - nothing_saved), job.text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_killed_in_each_phase_of_a_save_resumes_bit_for_bit(new_job, uninterrupted, rank):
    job = new_job().with_faults(*(kill(rank=rank, at=phase, step=8 + 8 * i) for i, phase in enumerate(SNAPSHOT)))
    job.run()
    assert_survived(job, uninterrupted())
    # a save counts from the last writer's record on, which may be the other's
    assert [step for step, _ in job.resumes()] in ([0, 6, 14, 22, 30], [0, 6, 14, 22, 32]) or job.skips(), job.text()


def test_a_worker_killed_in_each_phase_of_a_persist_resumes_bit_for_bit(new_job, uninterrupted):
    job = new_job().with_faults(*(kill(rank=i % 2, at=phase, step=4 + 7 * i) for i, phase in enumerate(PERSIST)))
    job.run("--named", "--disk", "4")
    assert_survived(job, uninterrupted())


def test_a_worker_killed_while_the_job_resumes_resumes_bit_for_bit(new_job, uninterrupted):
    saved = kill(rank=1, at="snapshot.fill", step=20)
    resuming = [kill(rank=rank, at=phase) for phase in RESUME for rank in (0, 1)]
    job = new_job().with_faults(kill(rank=0, at="arena.reserve"), saved, *resuming).run()
    assert_survived(job, uninterrupted(), nothing_saved=1)
    assert {step for step, _ in job.resumes()} == {0, 18} or job.skips(), job.text()


def test_a_worker_killed_in_the_middle_of_a_fill_resumes_bit_for_bit(new_job, uninterrupted):
    """The state has 6 parameters, 12 moments, 6 counters and the generator; rank 1 copies its generator alone."""
    faults = [
        kill(rank=0, at="snapshot.fill", step=6 + 6 * i, copied=copied) for i, copied in enumerate((0, 5, 11, 24))
    ]
    job = new_job().with_faults(*faults, kill(rank=1, at="snapshot.fill", step=28, copied=0))
    job.run()
    assert_survived(job, uninterrupted())
    assert [step for step, _ in job.resumes()] == [0, 4, 10, 16, 22, 26] or job.skips(), job.text()


def test_both_workers_killed_in_each_phase_resume_bit_for_bit(new_job, uninterrupted):
    saving = [kill_both(at=phase, step=4 + 4 * i, seen_by=i % 2) for i, phase in enumerate(SNAPSHOT)]
    persisting = [kill_both(at=phase, step=20 + 4 * i) for i, phase in enumerate(PERSIST)]
    resuming = [kill_both(at=phase, seen_by=i % 2) for i, phase in enumerate(RESUME)]
    job = new_job().with_faults(kill_both(at="arena.reserve"), *saving, *persisting, *resuming)
    job.run("--named", "--disk", "4")
    assert_survived(job, uninterrupted(), nothing_saved=1)


@pytest.mark.parametrize("phases", [SNAPSHOT, PERSIST[:4], PERSIST[4:], RESUME + LAUNCH], ids=lambda p: p[0])
def test_a_job_whose_agent_is_killed_in_each_phase_resumes_bit_for_bit(new_job, uninterrupted, phases):
    """Its workers die with it; the next launch adopts its memory."""
    first = {SNAPSHOT: [kill_agent(at="arena.reserve")], RESUME + LAUNCH: [kill_agent(at="snapshot.fill", step=20)]}
    kills = [kill_agent(at=phase, step=8 + 12 * i, seen_by=i % 2) for i, phase in enumerate(phases)]
    job = new_job().with_faults(*first.get(phases, []), *kills).run_to_the_end("--named", "--disk", "4")
    assert_survived(job, uninterrupted(), nothing_saved=phases == SNAPSHOT)
    assert job.launches >= len(job.faults), "two can happen at once"


@pytest.mark.parametrize(
    "phases",
    [
        (SNAPSHOT[1], PERSIST[4], "resume.load"),
        pytest.param((*SNAPSHOT[1:3], "resume.load", "arena.adopt"), marks=pytest.mark.campaign),
        pytest.param(PERSIST[:5:2], marks=pytest.mark.campaign),
    ],
    ids=["some", "snapshot", "persist"],
)
def test_a_job_whose_agent_and_workers_are_killed_at_once_resumes_bit_for_bit(new_job, uninterrupted, phases):
    kills = [kill_all(at=phase, step=10 + 12 * i, seen_by=i % 2) for i, phase in enumerate(phases)]
    job = new_job().with_faults(*kills).run_to_the_end("--named", "--disk", "4")
    assert_survived(job, uninterrupted())
    assert job.launches >= len(job.faults) - 1, "three can happen at once, as they are of several processes"
