"""Jobs of random data that are killed at random: a few of each kind here, hundreds by make fuzz-data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.data_kinds import KINDS

ROOT = Path(__file__).parents[2]


def fuzzed(first: int, end: int, kills: int) -> list[str]:
    """What the jobs of these numbers said, in a process of its own, which forks them."""
    program = [sys.executable, "-m", "tests.fuzz.data", *map(str, (first, end, kills))]
    done = subprocess.run(
        program, cwd=ROOT, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"}, capture_output=True, text=True,
        check=False, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.frameworks
@pytest.mark.parametrize("part", [0, 1])
def test_random_jobs_use_each_sample_of_each_kind_of_data_once(part: int):
    half = -(-len(KINDS) // 2)
    first, end = (0, half) if part == 0 else (half, len(KINDS))
    said = fuzzed(first, end, kills=3)
    assert [line.split(": ")[1].split(",")[0] for line in said[:-1]] == list(KINDS)[first:end]
    assert said[-1].endswith("each sample once")


@pytest.mark.campaign
def test_a_campaign_of_random_jobs_uses_each_sample_once():
    """FASTCKPT_FUZZ jobs (default 300)."""
    jobs = int(os.environ.get("FASTCKPT_FUZZ", "300"))
    assert fuzzed(len(KINDS), len(KINDS) + jobs, kills=6)[-1].startswith(f"{jobs} jobs")
