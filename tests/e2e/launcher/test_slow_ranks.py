"""The slow rank of real jobs: each part of a step, and all that looks like one."""

import json
from typing import Any

import pytest

from tests.e2e.launcher.conftest import FORK, OURS, Jobs, program
from tests.support.json_lines import whole_lines

PARTS = ("data", "forward", "backward", "rest")
LOST = 0.05
"""Seconds that a slow rank loses in each step, which without that takes some milliseconds."""
BRIEF = f"from fastckpt._core.policy import stragglers; stragglers.Stragglers.__init__.__defaults__ = (20, 0.8); {OURS}"
"""A launcher for which windows last 0.8 s at least, not 1.5 s."""


def run(jobs: Jobs, plan: list[list[Any]], *more: str, ranks: int = 2, **environment: str) -> list[dict[str, Any]]:
    """Run a job by a plan; returns its events."""
    directory = jobs.folder / "checkpoints"
    directory.mkdir(exist_ok=True)
    options = (*FORK, f"--nproc-per-node={ranks}", "--max-restarts=2")
    jobs.launch(*options, program("slow_rank.py"), str(directory), json.dumps(plan), *more, **environment)
    return whole_lines(jobs.folder / "events")


def verdicts(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(event["rank"], event["part"]) for event in events if event["event"] == "straggler" and event["slow"]]


def test_each_part_of_a_step_is_named_with_the_rank_that_is_slow_in_it(jobs: Jobs):
    # A window is of 20 steps, and three in a row count, after one in which the slowness begins. The
    # other rank is slow next, which ends the slowness of the first.
    plan = [[20 + 100 * at, 120 + 100 * at, [at % 2], part, LOST] for at, part in enumerate(PARTS)]
    events = run(jobs, plan, launcher=BRIEF)
    assert verdicts(events) == [(at % 2, part) for at, part in enumerate(PARTS)]
    named = [event for event in events if event["event"] == "straggler" and event["slow"]]
    assert all(event["own"] > event["others"] + 0.8 * LOST and event["cost"] > 0.15 for event in named)
    ended = [event["rank"] for event in events if event["event"] == "straggler" and not event["slow"]]
    assert ended == [0, 1, 0], "that of the last part is still slow at the end"
    # Of each look, the ranks that have closed a window since the one before.
    last = {one["rank"]: one for event in events if event["event"] == "rank_times" for one in event["ranks"]}
    assert last[1]["rest"] >= LOST > last[0]["rest"]


STEP = {"STEP_NAP": "0.1"}
"""Makes a step of 0.1 s, so that 60 of them are longer than three windows have to be."""
BEGIN = 60
CLEAN = {
    "all alike": [[BEGIN, 200, [0, 1, 2, 3], "backward", 0.1]],
    "three of four": [[BEGIN, 200, [0, 1, 2], "forward", 0.1]],
    "a rank after the other": [[step, step + 1, [step % 4], "data", 0.1] for step in range(20, 200)],
    "windows in turns": [[step, step + 20, [step // 20 % 4], "forward", 0.1] for step in range(20, 220, 20)],
    "an evaluation": [[BEGIN, BEGIN, [0], "evaluation", 8.0], [160, 160, [], "data", 0]],
    "an unmarked evaluation": [[BEGIN, BEGIN, [0], "unmarked evaluation", 8.0], [160, 160, [], "data", 0]],
    "saves": [[step, step, [0, 1, 2, 3], "save", 3e7] for step in range(BEGIN, 160, 5)] + [[180, 180, [], "data", 0]],
}


@pytest.mark.campaign
@pytest.mark.parametrize("plan", CLEAN.values(), ids=CLEAN.keys())
def test_what_only_looks_like_a_slow_rank_is_not_named(jobs: Jobs, plan: list[list[Any]]):
    assert verdicts(run(jobs, plan, ranks=4, **STEP)) == []


@pytest.mark.campaign
def test_two_of_four_slow_ranks_are_named(jobs: Jobs):
    assert set(verdicts(run(jobs, [[BEGIN, 160, [1, 2], "data", 0.15]], ranks=4, **STEP))) == {(1, "data"), (2, "data")}


@pytest.mark.campaign
def test_a_rank_that_is_still_slow_after_a_restart_is_named_again(jobs: Jobs):
    plan = [[0, 160, [1], "data", 0.15], [150, 150, [0], "exit", 0]]
    assert verdicts(run(jobs, plan, **STEP)) == [(1, "data")] * 2


@pytest.mark.campaign
@pytest.mark.parametrize("number", range(20))
def test_a_slow_rank_is_named_alone_with_its_part_within_sixty_steps(jobs: Jobs, number: int):
    kind, ranks, part = ("ddp", "fsdp")[number // 10], (2, 4)[number % 2], PARTS[number // 2 % 4]
    slow, begin = number % ranks, BEGIN + 40
    plan = [[begin, begin + 100, [slow], part, 0.06]]
    events = run(jobs, plan, kind, ranks=ranks, **STEP)
    assert verdicts(events) == [(slow, part)]
    # Windows are numbered from 1: the last step of the one in which it was found, after the first that was slow.
    (found,) = [event["window"] for event in events if event["event"] == "straggler" and event["slow"]]
    assert 20 * found - begin <= 60


@pytest.mark.campaign
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("number", range(5))
def test_nobody_is_named_in_two_thousand_clean_steps(jobs: Jobs, ranks: int, number: int):
    assert verdicts(run(jobs, [], "ddp", "2000", ranks=ranks, STEP_NAP="0.01")) == []
