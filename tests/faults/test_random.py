"""Workers and agents killed at instants drawn by chance."""

import os
import random
import signal
import time

import pytest

from tests.faults.faults import Fault, kill
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened

GAP = 12
"""Steps between two kills of one worker: more than a job does within the longest delay."""
WIDE_GAP = 40
"""The same for kills from outside, which come when a step has been seen in the log."""
LONGEST_DELAY = 0.02
LONGEST_START = 3.0
"""Seconds in which a launch has come to its first step, mostly."""
BOTH, AGENT, ALL = (0, 1), ("agent",), ("agent", 0, 1)
NAMES = {BOTH: "both", AGENT: "agent", ALL: "agent-and-workers"}


def drawn(count: int, seed: int) -> list[Fault]:
    """Kills of either rank, each some time after the beginning of a step."""
    rng = random.Random(seed)
    delays = (rng.uniform(1e-5, LONGEST_DELAY) for _ in range(count))
    steps = (GAP * i + rng.randrange(3, 6) for i in range(count))
    return [kill(rng.randrange(2), "train.step", step, after) for step, after in zip(steps, delays, strict=True)]


def told(job: Job, kills: int) -> str:
    tiers = [next(iter(start.values()))[0]["tier"] for start in job.starts()[1:]]
    repeated = [steps for steps, _ in job.repeated()]
    skipped = sum(skips for _, skips in job.repeated())
    print(f"{kills} kills, {len(tiers)} resumes; steps repeated {repeated}; saves skipped {skipped}; tiers {tiers}")
    return "".join(sorted(set(tiers)))


def survive(job: Job, reference: Job, faults: list[Fault], steps: int) -> None:
    job.with_faults(*faults).run("--steps", str(steps))
    tiers = told(job, len(faults))
    assert len(job.resumes()) - 1 == job.injected() == len(faults)
    assert tiers == "memory"
    assert_as_if_nothing_had_happened(job, reference)


def survive_all_at_once(job: Job, reference: Job, kills: int, rng: random.Random, steps: int) -> None:
    """Both workers, so often in one launch."""
    job.start("--steps", str(steps), restarts=kills + 2)
    for i in range(kills):
        few = rng.randrange(2, 8)
        job.until(lambda i=i, few=few: len(job.resumes()) > i and len(job.starts()[-1][0]) > few, f"start {i} going")
        time.sleep(rng.uniform(0, LONGEST_DELAY))
        job.kill_processes(*rng.sample(BOTH, 2))
    assert job.wait() == 0, job.text()
    assert told(job, kills) == "memory"
    assert len(job.resumes()) == kills + 1
    assert_as_if_nothing_had_happened(job, reference)


def survive_launches(job: Job, reference: Job, victims: tuple, kills: int, rng: random.Random, steps: int) -> None:
    """The agent, alone or with its workers, in launch after launch: every second one anywhere on its way to a step."""
    for i in range(kills):
        begin = WIDE_GAP * (i // 2)
        job.start("--steps", str(steps), "--stop-at", str(begin + WIDE_GAP // 2), restarts=0)
        if i % 2:
            time.sleep(rng.uniform(0, LONGEST_START))
        else:
            job.wait_for("step", begin + rng.randrange(3, 9))
            time.sleep(rng.uniform(0, LONGEST_DELAY))
        job.kill_processes(*rng.sample(victims, len(victims)))
        assert job.wait() == -signal.SIGKILL, job.text()
    job.run("--steps", str(steps))
    assert told(job, kills) == "memory", job.text()
    assert len(job.starts()) > kills // 2
    assert_as_if_nothing_had_happened(job, reference)


def test_ten_kills_of_workers_at_random_instants_resume_bit_for_bit(new_job, uninterrupted):
    steps = 10 * GAP + 10
    survive(new_job(), uninterrupted("--steps", str(steps)), drawn(10, 1), steps)


@pytest.mark.parametrize(
    "victims",
    [pytest.param(BOTH, marks=pytest.mark.campaign), pytest.param(AGENT, marks=pytest.mark.campaign), ALL],
    ids=NAMES.get,
)
def test_random_kills_of_several_processes_at_once_resume_bit_for_bit(new_job, uninterrupted, victims):
    kills, steps = 4 if victims == BOTH else 2, 10 * GAP + 10
    kill_them(new_job(), uninterrupted("--steps", str(steps)), victims, kills, random.Random(3), steps)


def kill_them(job: Job, reference: Job, victims: tuple, kills: int, rng: random.Random, steps: int) -> None:
    if victims == BOTH:
        survive_all_at_once(job, reference, kills, rng, steps)
    else:
        survive_launches(job, reference, victims, kills, rng, steps)


@pytest.mark.campaign
def test_a_campaign_of_random_kills_of_workers_resumes_bit_for_bit(new_job, uninterrupted):
    """FASTCKPT_CAMPAIGN rounds (default 10) of 40 kills; FASTCKPT_SEED repeats one that failed."""
    rounds, kills = int(os.environ.get("FASTCKPT_CAMPAIGN", "10")), 40
    seed = seed_of_today()
    steps = kills * GAP + 10
    for i in range(rounds):
        print(f"\nround {i + 1} of {rounds}: seed {seed + i}, {kills} kills", flush=True)
        survive(new_job(f"round-{i}"), uninterrupted("--steps", str(steps)), drawn(kills, seed + i), steps)


@pytest.mark.campaign
@pytest.mark.parametrize("victims", [BOTH, AGENT, ALL], ids=NAMES.get)
def test_a_campaign_of_random_kills_of_several_processes_resumes_bit_for_bit(new_job, uninterrupted, victims):
    """5 kills of these for each round of the campaign: 50, if it has 10."""
    kills = 5 * int(os.environ.get("FASTCKPT_CAMPAIGN", "10"))
    seed, steps = seed_of_today(), kills * WIDE_GAP + 10
    print(f"\nseed {seed}, {kills} kills of {NAMES[victims]}", flush=True)
    kill_them(new_job(), uninterrupted("--steps", str(steps)), victims, kills, random.Random(seed), steps)


def seed_of_today() -> int:
    return int(os.environ.get("FASTCKPT_SEED") or random.randrange(10**6))
