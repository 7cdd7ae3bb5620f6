"""Workers killed at instants drawn by chance."""

import os
import random

import pytest

from tests.faults.faults import Fault, kill
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened

GAP = 12
"""Steps between two kills: more than a job does within the longest delay."""
LONGEST_DELAY = 0.02


def drawn(count: int, seed: int) -> list[Fault]:
    """Kills of either rank, each some time after the beginning of a step."""
    rng = random.Random(seed)
    delays = (rng.uniform(1e-5, LONGEST_DELAY) for _ in range(count))
    steps = (GAP * i + rng.randrange(3, 6) for i in range(count))
    return [kill(rng.randrange(2), "train.step", step, after) for step, after in zip(steps, delays, strict=True)]


def survive(job: Job, reference: Job, faults: list[Fault], steps: int) -> None:
    job.befalls(*faults).run("--steps", str(steps))
    deaths = len(job.resumes()) - 1
    tiers = [tier for _, tier in job.resumes()[1:]]
    repeated = [steps for steps, _ in job.repeated()]
    skipped = sum(skips for _, skips in job.repeated())
    print(f"{deaths} kills in {steps} steps; steps repeated {repeated}; saves skipped {skipped}; tiers {tiers}")
    assert deaths == job.struck() == len(faults)
    assert set(tiers) == {"memory"}
    assert_as_if_nothing_had_happened(job, reference)


@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills_in_a_row(new_job, uninterrupted, seed):
    steps = 10 * GAP + 10
    survive(new_job(), uninterrupted("--steps", str(steps)), drawn(10, seed), steps)


@pytest.mark.campaign
def test_campaign(new_job, uninterrupted):
    """FASTCKPT_CAMPAIGN rounds (default 10) of 40 kills; FASTCKPT_SEED repeats one that failed."""
    rounds, kills = int(os.environ.get("FASTCKPT_CAMPAIGN", "10")), 40
    seed = int(os.environ.get("FASTCKPT_SEED") or random.randrange(10**6))
    steps = kills * GAP + 10
    for i in range(rounds):
        print(f"\nround {i + 1} of {rounds}: seed {seed + i}, {kills} kills", flush=True)
        survive(new_job(f"round-{i}"), uninterrupted("--steps", str(steps)), drawn(kills, seed + i), steps)
