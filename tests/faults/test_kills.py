"""Workers and agents killed again and again, at any instant: each resume is right, and nothing grows."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.faults import kill
from tests.faults.jobs import Job, assert_all_injected, assert_as_if_nothing_had_happened
from tests.support.json_lines import whole_lines

WIDE_GAP = 40
"""Steps between two kills: more than a job does within the longest delay once a step has been seen in its log."""
LONGEST_DELAY = 0.02
LONGEST_START = 3.0
"""Seconds in which a launch has come to its first step, mostly."""
PAUSE = 6
"""Steps from one row of kills to the next."""
MEAN = 0.3
"""Seconds from the start of workers to a kill in a row, on average: about as long as they take to their first step."""
MAY_GROW = {"descriptors": 4, "threads": 6, "mappings": 40, "memory": 20 << 20, "processes": 0, "files": 1}
campaign = pytest.mark.campaign


@pytest.mark.parametrize("script", ["", "--overlap"])
def test_a_worker_killed_in_the_middle_of_a_copy_resumes_bit_for_bit(new_job, uninterrupted, script) -> None:
    """The state has 6 parameters, 12 moments, 6 counters and the generator."""
    phase = "overlap.copy" if script else "snapshot.fill"
    job = new_job().with_faults(kill(0, phase, 10, copied=23 if script else 7)).run(*script.split())
    assert_all_injected(job)
    assert_as_if_nothing_had_happened(job, uninterrupted(), interval=4 if script else 2)
    assert job.resumes() == [(0, ""), (8, "memory")] or job.skips(), job.text()
    for start in job.starts() if script else []:
        asked = [next(iter(line)) for line in start[0] if "saved" in line or "pending" in line]
        assert asked[:1] in ([], ["saved"]), "the first save of a start is copied at once"


@campaign
@pytest.mark.parametrize("victims", [("agent",), ("agent", 0, 1)], ids=str)
def test_random_kills_of_several_processes_at_once_resume_bit_for_bit(new_job, uninterrupted, victims) -> None:
    """In launch after launch, every second one anywhere on its way to a step."""
    seed = int(os.environ.get("FASTCKPT_SEED") or random.randrange(10**6))  # which repeats a campaign
    print(f"\nseed {seed}", flush=True)
    kills = 5 * int(os.environ.get("FASTCKPT_CAMPAIGN", "10"))
    rng, steps, job = random.Random(seed), (kills + 2) * WIDE_GAP, new_job()
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
    tiers = [next(iter(start.values()))[0]["tier"] for start in job.starts()]
    assert tiers == [""] + ["memory"] * (len(tiers) - 1), job.text()
    assert_as_if_nothing_had_happened(job, uninterrupted("--steps", str(steps)))


# --- in rows, and what is held meanwhile


def held(pid: int) -> dict[str, int]:
    """What a process holds: descriptors, mappings, and bytes of memory that are its own."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "mappings": len((process / "maps").read_text().splitlines()),
        "memory": int(status["RssAnon"].split()[0]) << 10,
        "threads": int(status["Threads"]),
    }


def assert_flat_soon(job: Job, early: dict[str, Any]) -> None:
    """Nothing has grown, once a flush that is under way has come to its end."""
    end = time.monotonic() + 60
    while grown := [
        (who, what, early[who][what], now)
        for who, one in look(job).items()
        for what, now in one.items()
        if now > early[who][what] + MAY_GROW[what]
    ]:
        assert time.monotonic() < end, grown
        time.sleep(0.1)


def started(job: Job) -> list[dict[str, int]]:
    """The pids of all workers that the agent has started, by rank."""
    return [line["pids"] for line in whole_lines(job.events) if line["event"] == "workers_started"]


def kill_in_a_row(job: Job, kills: int, rng: random.Random) -> None:
    """Kill one of the workers, or both, some time after each start."""
    for _ in range(kills):
        starts = started(job)
        time.sleep(rng.expovariate(1 / MEAN))
        for rank in rng.sample(("0", "1"), rng.choice((1, 1, 2))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(starts[-1][rank], signal.SIGKILL)
        job.until(lambda before=starts: len(started(job)) > len(before), "the next start")


def look(job: Job) -> dict[str, Any]:
    """What the agent, its template if there is one, and shared memory hold while all ranks wait."""
    assert job.process is not None
    agent = psutil.Process(job.process.pid)
    workers = {job.pid(rank) for rank in (0, 1)}
    descendants = {child.pid for child in agent.children(recursive=True)}
    assert workers <= descendants
    others = descendants - workers
    assert len(others) <= 1, others
    shared = [str(path) for path in Path(job.arena()).parent.rglob("*")]
    shared += [path.name for path in Path("/dev/shm").glob(f"*{job.arena().name}*")]
    own = {"agent": held(agent.pid)} | dict(zip(["template"], map(held, others), strict=False))
    own |= {f"rank {rank}": held(job.pid(rank)) for rank in (0, 1)}
    return own | {"all": {"processes": len(descendants), "files": len(shared)}}


def wait_after(job: Job, kills: int, step: int) -> None:
    """Wait until both ranks wait at a step, in their start after so many kills or later."""
    for rank in (0, 1):

        def waits(rank: int = rank) -> bool:
            log = job.log(rank)
            starts = [i for i, line in enumerate(log) if "loaded" in line]
            is_last = len(started(job)) > kills and log and log[starts[-1]]["pid"] == started(job)[-1][str(rank)]
            return bool(is_last) and any(line.get("waiting") == step for line in log[starts[-1] :])

        job.until(waits, f"step {step} of rank {rank} after {kills} kills")


@pytest.mark.parametrize(
    ("rows", "kills", "preload"),
    [
        (4, 2, "auto"),
        *(pytest.param(*each, marks=campaign) for each in ((50, 1, "off"), (12, 6, "auto"), (3, 25, "auto"))),
    ],
)
def test_rows_of_kills_resume_right_and_grow_nothing(new_job, uninterrupted, rows, kills, preload) -> None:
    """More in a row than failures may be, anywhere on the way of a start: what is held after the third stays."""
    points = [row * PAUSE + 1 for row in range(1, rows + 2)]  # not saved, those before it are
    steps = ("--steps", str((rows + 2) * PAUSE)) if rows > 8 else ()  # or the usual 60
    options = {"FASTCKPT_PRELOAD": preload, "FASTCKPT_MAX_STALLS": str(kills)}
    job, rng, seen = new_job(), random.Random(f"{rows} {kills}"), []
    job.start(*steps, "--wait-at", *map(str, points), restarts=rows * kills, **options)
    for row, point in enumerate(points):
        wait_after(job, row * kills, point)
        seen.append(look(job))
        if row < rows:
            kill_in_a_row(job, kills, rng)
        elif rows > 3:
            assert_flat_soon(job, seen[2])
        job.go_on(point)
    assert job.wait() == 0, job.text()
    assert ("template" in seen[-1]) == (preload != "off"), job.text()
    assert len(started(job)) == rows * kills + 1
    assert {tier for rank in (0, 1) for _, tier in job.resumes(rank)[1:]} == {"memory"}
    assert_as_if_nothing_had_happened(job, uninterrupted(*steps))
