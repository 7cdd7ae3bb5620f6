"""The slow rank of a real job, in each part of a step."""

import json

from tests.e2e.launcher.conftest import FORK, OURS, Jobs, program

PARTS = ("backward", "rest")
LOST = 0.05
"""Seconds that a slow rank loses in each step, which without that takes some milliseconds."""
BRIEF = f"from fastckpt._core.policy import stragglers; stragglers.Stragglers.__init__.__defaults__ = (20, 0.8); {OURS}"
"""A launcher for which windows last 0.8 s at least, not 1.5 s."""


def test_each_part_of_a_step_is_named_with_the_rank_that_is_slow_in_it(jobs: Jobs):
    # A window is of 20 steps, and three in a row count, after one in which the slowness begins. The
    # other rank is slow next, which ends the slowness of the first.
    plan = json.dumps([[20 + 100 * at, 120 + 100 * at, at % 2, part, LOST] for at, part in enumerate(PARTS)])
    directory = jobs.folder / "checkpoints"
    directory.mkdir()
    jobs.launch(*FORK, "--nproc-per-node=2", program("slow_rank.py"), str(directory), plan, launcher=BRIEF)
    verdicts = jobs.told("straggler")
    named = [event for event in verdicts if event["slow"]]
    assert [(event["rank"], event["part"]) for event in named] == [(at % 2, part) for at, part in enumerate(PARTS)]
    assert all(event["own"] > event["others"] + 0.8 * LOST and event["cost"] > 0.15 for event in named)
    ended = [event["rank"] for event in verdicts if not event["slow"]]
    assert ended == [0], "that of the last part is still slow at the end"
    # Of each look, the ranks that have closed a window since the one before.
    last = {one["rank"]: one for event in jobs.told("rank_times") for one in event["ranks"]}
    assert last[1]["rest"] >= LOST > last[0]["rest"]
