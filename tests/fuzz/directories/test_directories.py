"""Directories that lie: nothing outside is touched, and nothing waits."""

import os
import random
from pathlib import Path

import pytest

from tests.fuzz.directories.actions import ACTIONS
from tests.fuzz.directories.lies import REACHING, WAITING, Lie
from tests.fuzz.directories.sandbox import Sandbox

SLOW_S = 60.0
"""What has not ended then waits for ever: a machine with much to do is slow."""


def wrongs(sandbox: Sandbox, cases: list[tuple[str, Lie]]) -> dict[tuple[str, str], list[str]]:
    found = {(action, lie.name): sandbox.wrongs(action, lie) for action, lie in cases}
    return {case: each for case, each in found.items() if each}


def test_nothing_outside_a_directory_is_touched_and_nothing_waits_on_the_word_of_a_file_in_it(tmp_path: Path):
    sandbox = Sandbox(tmp_path, SLOW_S)
    lies = sandbox.lies()
    cases = [(action, Lie(name, "", tell)) for name, (action, tell) in REACHING.items()]
    cases += [(action, lie) for action, names in WAITING.items() for lie in lies if lie.name in names]
    assert len(cases) == len(REACHING) + sum(map(len, WAITING.values()))
    assert not wrongs(sandbox, cases)


@pytest.mark.campaign
def test_a_campaign_of_lies_leaves_all_outside_as_it_was(tmp_path: Path):
    """FASTCKPT_FUZZ lies (default 1,000), drawn by their numbers."""
    sandbox = Sandbox(tmp_path)
    lies, count = sandbox.lies(), int(os.environ.get("FASTCKPT_FUZZ", "1000"))
    draws = [random.Random(number) for number in range(count)]
    assert not wrongs(sandbox, [(draw.choice(list(ACTIONS)), draw.choice(lies)) for draw in draws])
