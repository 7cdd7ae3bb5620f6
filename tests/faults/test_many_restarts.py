"""One job whose workers are killed again and again: each resume is right, and nothing grows in agent and template."""

import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.endure import held
from tests.faults.jobs import Job, assert_as_if_nothing_had_happened

PAUSE = 6
"""Steps from one point at which all ranks wait to be looked at to the next."""
SETTLED = 2
"""Kills after which nothing may grow any more."""
SOON = 60.0
"""Seconds for a flush to come to its end."""
MEGABYTE = 1 << 20


def look(job: Job) -> dict[str, Any]:
    """What the agent, its template if there is one, and shared memory hold while all ranks wait."""
    assert job.process is not None
    agent = psutil.Process(job.process.pid)
    workers = {job.pid(rank) for rank in (0, 1)}
    descendants = {child.pid for child in agent.children(recursive=True)}
    assert workers <= descendants
    others = descendants - workers
    assert len(others) <= 1, others
    own = {"agent": held(agent.pid)} | dict(zip(["template"], map(held, others), strict=False))
    shared = [str(path) for path in Path(job.arena()).parent.rglob("*")]
    shared += [path.name for path in Path("/dev/shm").glob(f"*{job.arena().name}*")]
    return {"processes": len(descendants), "own": own, "shared": len(shared)}


def assert_flat_soon(job: Job, early: dict[str, Any]) -> dict[str, Any]:
    """What there is once a flush that is under way has come to its end; workers wait meanwhile."""
    end = time.monotonic() + SOON
    while True:
        late = look(job)
        try:
            assert_flat(early, late)
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return late


def assert_flat(early: dict[str, Any], late: dict[str, Any]) -> None:
    assert late["processes"] == early["processes"], (early, late)
    assert late["shared"] <= early["shared"] + 1, (early, late)  # a persist may be looking at what is there
    for name, before in early["own"].items():
        after = late["own"][name]
        assert after["descriptors"] <= before["descriptors"] + 4, (name, before, after)
        assert after["threads"] <= before["threads"] + 6, (name, before, after)
        assert after["mappings"] <= before["mappings"] + 40, (name, before, after)
        assert after["memory"] <= before["memory"] + 20 * MEGABYTE, (name, before, after)


def wait_after(job: Job, kills: int, step: int) -> None:
    """Wait until both ranks wait at a step, in their start after so many kills."""
    for rank in (0, 1):

        def waits(rank: int = rank) -> bool:
            log = job.log(rank)
            starts = [i for i, line in enumerate(log) if "loaded" in line]
            return len(starts) > kills and any(line.get("waiting") == step for line in log[starts[-1] :])

        job.until(waits, f"step {step} of rank {rank} after {kills} kills")


def check(job: Job, reference: Job, kills: int, script: list[str], preload: str) -> None:
    job.start(*script, restarts=100, FASTCKPT_PRELOAD=preload)
    seen = []
    for turn in range(kills):
        wait_after(job, turn, (turn + 1) * PAUSE)
        seen.append(look(job))
        job.kill_processes(
            random.choice((0, 1))
        )  # before they go on: they could be at the next point by then, and resume past it
        job.go_on((turn + 1) * PAUSE)
    wait_after(job, kills, (kills + 1) * PAUSE)
    seen.append(assert_flat_soon(job, seen[SETTLED]))
    job.go_on((kills + 1) * PAUSE)
    assert job.wait() == 0, job.text()
    print(f"{kills} kills, preload {preload}: {seen[SETTLED]} ... {seen[-1]}")
    assert ("template" in seen[-1]["own"]) == (preload != "off"), job.text()
    assert len(job.resumes(0)) == kills + 1
    assert {tier for rank in (0, 1) for _, tier in job.resumes(rank)[1:]} == {"memory"}
    assert_as_if_nothing_had_happened(job, reference)


def many_kills(new_job: Any, uninterrupted: Any, kills: int, preload: str) -> None:
    points = [str(step) for step in range(PAUSE, (kills + 1) * PAUSE + 1, PAUSE)]
    steps = ["--steps", str((kills + 2) * PAUSE)]
    check(new_job("job"), uninterrupted(*steps), kills, [*steps, "--wait-at", *points], preload)


@pytest.mark.parametrize(("kills", "preload"), [(5, "auto"), pytest.param(3, "off", marks=pytest.mark.campaign)])
def test_several_kills_in_a_row_resume_right_and_grow_nothing(
    new_job: Any, uninterrupted: Any, kills: int, preload: str
):
    many_kills(new_job, uninterrupted, kills, preload)


@pytest.mark.campaign
@pytest.mark.parametrize("preload", ["auto", "off"])
def test_fifty_kills_in_a_row_resume_right_and_grow_nothing(new_job: Any, uninterrupted: Any, preload: str):
    many_kills(new_job, uninterrupted, 50, preload)
