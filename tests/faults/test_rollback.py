"""Jobs that lose all memory while storage is slower than their persists: they go back by one persist at most."""

import os
import random
import signal
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.faults.jobs import Job

LINES = "programs/lines.py"
MBPS, OFTEN, LONGEST_DELAY = "0.2", "0.01", 0.3
"""A rate at which a persist takes many steps; seconds between persists, that is far fewer; seconds before a kill."""
ROUNDS = int(os.environ.get("FASTCKPT_CAMPAIGN", "10"))
STEPS = 80
"""Steps of each launch, at most; the last one has as many."""


def script(kills: int) -> tuple[str, ...]:
    return "--samples", str(8 * STEPS * (kills + 1)), "--epochs", "1", "--storage-seconds", OFTEN


def starts(job: Job) -> list[list[dict[str, Any]]]:
    """What rank 0 logged, start after start."""
    return [start[0] for start in job.starts() if 0 in start]


def asked(start: list[dict[str, Any]]) -> list[int]:
    """The step from which it went on, and those of which it asked for a persist."""
    return [line.get("asked", line.get("loaded")) for line in start if "asked" in line or "loaded" in line]


def lose_memory(job: Job, rng: random.Random, launch: int, *arguments: str) -> int:
    """Kill the job at some moment after a few persists, with all that is in memory; the newest step on storage."""
    persists, last = rng.randrange(1, 4), STEPS * (launch + 1)

    def far_enough() -> bool:
        lines = starts(job)[-1] if len(starts(job)) > launch else []
        return len(asked(lines)) > persists or any(line.get("step") == last for line in lines)

    job.start(*arguments, "--stop-at", str(last), program=LINES, restarts=0, FASTCKPT_PERSIST_MBPS=MBPS)
    job.until(far_enough, f"{persists} persists, or step {last}")
    time.sleep(rng.uniform(0, LONGEST_DELAY))
    job.kill_processes("agent", 0, 1)
    assert job.wait() == -signal.SIGKILL, job.text()
    job.lose_memory()
    return max(job.stored(), default=0)


def survive(job: Job, reference: Job, kills: int, seed: int) -> None:
    rng, arguments = random.Random(seed), script(kills)
    durable = [lose_memory(job, rng, launch, *arguments) for launch in range(kills)]
    job.run(*arguments, program=LINES, restarts=0)
    for (before, now), stored in zip(pairwise(starts(job)), durable, strict=True):
        print(f"asked for {asked(before)[1:]}, {stored} durable, resumed at {now[0]['loaded']}")
        assert now[0]["loaded"] == stored, job.text()
        assert now[0]["loaded"] in asked(before)[-2:], job.text()
    assert job.ends() == reference.ends(), job.text()
    for rank in (0, 1):
        assert job.losses(rank) == reference.losses(rank), job.text()


@pytest.mark.parametrize(
    ("kills", "rounds"), [(1, 1), pytest.param(5, ROUNDS, marks=pytest.mark.campaign)], ids=["once", "campaign"]
)
def test_a_job_that_loses_all_memory_goes_back_by_one_persist_at_most(new_job, uninterrupted, kills, rounds):
    seed = 4 if kills == 1 else int(os.environ.get("FASTCKPT_SEED") or random.randrange(10**6))
    for i in range(rounds):
        print(f"\nseed {seed + i}", flush=True)
        survive(new_job(f"round-{i}"), uninterrupted(*script(kills), program=LINES), kills=kills, seed=seed + i)
