"""More kills from outside in a row than failures may be, anywhere on the way of a start: the job goes on afterwards."""

import contextlib
import os
import random
import signal
import time
from functools import partial
from typing import Any

import pytest

from tests.faults.jobs import Job, assert_as_if_nothing_had_happened
from tests.support.json_lines import whole_lines

PAUSE = 6
"""Steps from one row of kills to the next."""
MEAN = 0.3
"""Seconds from the start of workers to a kill, on average: about as long as they take to their first step."""
MAX_STALLS = 3


def started(job: Job) -> list[dict[str, int]]:
    """The pids of all workers that the agent has started, by rank."""
    return [line["pids"] for line in whole_lines(job.events) if line["event"] == "workers_started"]


def is_started_again(job: Job, before: int) -> bool:
    return len(started(job)) > before


def kill_in_a_row(job: Job, kills: int, rng: random.Random) -> None:
    """Kill one of the workers, or both, some time after each start."""
    for _ in range(kills):
        starts = started(job)
        time.sleep(rng.expovariate(1 / MEAN))
        for rank in rng.sample(("0", "1"), rng.choice((1, 1, 2))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(starts[-1][rank], signal.SIGKILL)
        job.until(partial(is_started_again, job, len(starts)), "the next start")


def point(row: int) -> int:
    """The step at which workers wait, also those that were started again: it is not saved, those before it are."""
    return row * PAUSE + 1


def survive(job: Job, reference: Job, rows: int, kills: int, script: list[str]) -> None:
    rng = random.Random(f"{rows} {kills}")
    job.start(*script, restarts=rows * kills, FASTCKPT_MAX_STALLS=str(MAX_STALLS))
    for row in range(1, rows + 1):
        job.wait_for_all(point(row))
        kill_in_a_row(job, kills, rng)
        job.go_on(point(row))
    assert job.wait() == 0, job.text()
    assert len(started(job)) == rows * kills + 1
    assert_as_if_nothing_had_happened(job, reference)


def rows_of_kills(new_job: Any, uninterrupted: Any, rows: int, kills: int) -> None:
    steps = ["--steps", str((rows + 1) * PAUSE)]
    points = [str(point(row)) for row in range(1, rows + 1)]
    survive(new_job(), uninterrupted(*steps), rows, kills, [*steps, "--wait-at", *points])


def test_eight_kills_before_a_step_further_do_not_end_the_job(new_job: Any, uninterrupted: Any) -> None:
    rows_of_kills(new_job, uninterrupted, 1, 8)


@pytest.mark.campaign
@pytest.mark.parametrize(("rows", "kills"), [(12, 6), (3, 25)])
def test_many_rows_of_kills_do_not_end_the_job(new_job: Any, uninterrupted: Any, rows: int, kills: int) -> None:
    rows_of_kills(new_job, uninterrupted, rows, kills)
