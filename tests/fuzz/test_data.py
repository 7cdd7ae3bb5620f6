"""Jobs of random data that are killed at random: one of each kind here, hundreds by make fuzz-data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.data_kinds import KINDS

ROOT = Path(__file__).parents[2]


@pytest.mark.frameworks
def test_random_jobs_use_each_sample_of_each_kind_of_data_once():
    """In a process of its own, which forks them."""
    program = [sys.executable, "-m", "tests.fuzz.data", *map(str, (0, len(KINDS), 2))]
    done = subprocess.run(
        program, cwd=ROOT, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert [line.split(": ")[1].split(",")[0] for line in said[:-1]] == list(KINDS)
    assert said[-1].endswith("each sample once")
