"""Decisions on the frequency in event logs, in words."""

from typing import Any

import pytest

from fastckpt._core.report.report import Report, report
from fastckpt_run import formatting
from tests.unit._core.report.stories import Story

PROFILING = {"memory": None, "storage": None, "overhead": None, "bound": 0.035, "changed": False, "why": "profiling"}
CHOSEN = {"memory": 5, "storage": 10, "overhead": None, "bound": 0.035, "changed": True, "why": "chosen"}
KEPT = CHOSEN | {"overhead": 0.0312, "changed": False, "why": "as before"}
RARER = CHOSEN | {"memory": 10, "overhead": 0.07, "why": "the bound is broken"}
EVERY = "a snapshot every 5 steps, a persist every 10"
GIVEN = {"memory": 1, "storage": 1000, "overhead": None, "bound": None, "changed": True, "why": "given"}


def told(*said: dict[str, Any], story: Story | None = None) -> Story:
    story = story or Story().starts(1, 2, 3, 4).loads(5, 1)
    for number, fields in enumerate(said):
        story.at(story.now + 10, "frequency", directory="/run", step=7 * number, **fields)
    return story


def of(*said: dict[str, Any]) -> Report:
    return report([told(*said).log])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((PROFILING,), "none yet: what checkpoints cost is measured since step 0"),
        ((PROFILING, CHOSEN), EVERY),
        ((PROFILING, CHOSEN, KEPT), f"{EVERY}; checkpoints cost 3.12 % of training lately, of 3.50 % at most"),
        ((CHOSEN, KEPT, RARER, CHOSEN), f"{EVERY}; checkpoints cost 7.00 % of training lately, of 3.50 % at most"),
        ((GIVEN,), "a snapshot every 1 step, a persist every 1,000"),
    ],
)
def test_the_frequency_is_described_in_words(said: tuple[dict[str, Any], ...], expected: str):
    assert formatting.frequency(of(*said).decisions) == expected
