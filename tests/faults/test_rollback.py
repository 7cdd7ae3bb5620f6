"""Jobs that lose all memory while storage is slower than their persists: they go back by one persist at most."""

import os
import random
import signal
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.faults.jobs import Job
from tests.support.live_folders import remove_live

MBPS, OFTEN, LONGEST_DELAY = "0.2", "0.01", 0.3
"""A rate at which a persist takes many steps; seconds between persists, that is far fewer; seconds before a kill."""
STEPS = 80
"""Steps of each launch, at most; the last one has as many."""


def script(kills: int) -> tuple[str, ...]:
    return "--samples", str(8 * STEPS * (kills + 1)), "--epochs", "1", "--storage-seconds", OFTEN


def starts(job: Job) -> list[list[dict[str, Any]]]:
    """What rank 0 logged, start after start."""
    found: list[list[dict[str, Any]]] = []
    for line in job.log(0):
        if "loaded" in line:
            found.append([])
        found[-1].append(line)
    return found


def asked(start: list[dict[str, Any]]) -> list[int]:
    """The step from which it went on, and those of which it asked for a persist."""
    return [line.get("asked", line.get("loaded")) for line in start if "asked" in line or "loaded" in line]


def lose_memory(job: Job, rng: random.Random, launch: int, *arguments: str) -> int:
    """Kill the job at some moment after a few persists, with all that is in memory; the newest step on storage."""
    persists, last = rng.randrange(1, 4), STEPS * (launch + 1)

    def far_enough() -> bool:
        lines = starts(job)[-1] if len(starts(job)) > launch else []
        return len(asked(lines)) > persists or any(line.get("step") == last for line in lines)

    job.start(*arguments, "--stop-at", str(last), program="loop.py", restarts=0, FASTCKPT_PERSIST_MBPS=MBPS)
    job.until(far_enough, f"{persists} persists, or step {last}")
    time.sleep(rng.uniform(0, LONGEST_DELAY))
    job.kill_processes("agent", 0, 1)
    assert job.wait() == -signal.SIGKILL, job.text()
    remove_live(job.arena())
    return max(job.stored(), default=0)


def survive(job: Job, reference: Job, kills: int, seed: int) -> None:
    rng, arguments = random.Random(seed), script(kills)
    durable = [lose_memory(job, rng, launch, *arguments) for launch in range(kills)]
    job.run(*arguments, program="loop.py", restarts=0)
    for (before, now), stored in zip(pairwise(starts(job)), durable, strict=True):
        print(f"asked for {asked(before)[1:]}, {stored} durable, resumed at {now[0]['loaded']}")
        assert now[0]["loaded"] == stored, job.text()
        assert now[0]["loaded"] in asked(before)[-2:], job.text()
    assert job.ends() == reference.ends(), job.text()
    for rank in (0, 1):
        assert job.losses(rank) == reference.losses(rank), job.text()


def test_a_job_that_loses_all_memory_goes_back_by_one_persist_at_most(new_job, uninterrupted):
    survive(new_job(), uninterrupted(*script(1), program="loop.py"), kills=1, seed=4)


@pytest.mark.campaign
def test_a_campaign_of_losses_of_all_memory_goes_back_by_one_persist_at_most(new_job, uninterrupted):
    """5 kills for each round of the campaign, in jobs of 5."""
    seed = int(os.environ.get("FASTCKPT_SEED") or random.randrange(10**6))
    for i in range(int(os.environ.get("FASTCKPT_CAMPAIGN", "10"))):
        print(f"\nseed {seed + i}", flush=True)
        survive(new_job(f"round-{i}"), uninterrupted(*script(5), program="loop.py"), kills=5, seed=seed + i)
