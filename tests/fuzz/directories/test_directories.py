"""Directories that lie, each record in its own well-formed way: nothing outside is touched, and nothing waits."""

import os
import random
from collections import defaultdict
from pathlib import Path

import pytest

from tests.fuzz.directories.actions import ACTIONS
from tests.fuzz.directories.lies import Lie, of_entries, of_fields, of_pickles
from tests.fuzz.directories.sandbox import Sandbox
from tests.fuzz.directories.saved import SAVES
from tests.fuzz.directories.telling import REACHING, RUNNING, TOGETHER, WAITING

SLOW_S = 60.0
"""What has not ended then waits for ever: a machine with much to do is slow."""
FAMILIES = {of_entries: 5, of_fields: 4, of_pickles: 1}
"""Kinds of lies, and how often each is drawn."""


def wrongs(sandbox: Sandbox, cases: list[tuple[str, Lie]]) -> dict[tuple[str, str], list[str]]:
    found = {(action, lie.name): sandbox.wrongs(action, lie) for action, lie in cases}
    return {case: each for case, each in found.items() if each}


@pytest.mark.usefixtures("forked_launchers")
def test_nothing_outside_a_directory_is_touched_and_nothing_waits_on_the_word_of_a_file_in_it(tmp_path: Path):
    """Also where a job is launched beside several lies, and resumes."""
    sandbox = Sandbox("left", tmp_path, SLOW_S)
    [lies] = sandbox.lies(of_entries)
    cases = [(action, Lie(name, "", tell)) for name, (action, tell) in REACHING.items()]
    cases += [(action, lie) for action, names in WAITING.items() for lie in lies if lie.name in names]
    assert len(cases) == len(REACHING) + sum(map(len, WAITING.values()))
    assert not wrongs(sandbox, cases)
    assert not sandbox.launched(TOGETHER)


@pytest.mark.parametrize("kind", RUNNING)
def test_no_code_in_a_directory_is_run(tmp_path: Path, kind: str):
    sandbox = Sandbox(kind, tmp_path, SLOW_S)
    [lies] = sandbox.lies(of_pickles)
    told = [lie for lie in lies if lie.name in RUNNING[kind]]
    assert len(told) == len(RUNNING[kind])
    assert not wrongs(sandbox, [(action, lie) for lie in told for action in ("load", "resume", "look")])


@pytest.mark.campaign
@pytest.mark.parametrize("kind", SAVES)
def test_a_campaign_of_lies_leaves_all_outside_as_it_was(tmp_path: Path, kind: str):
    """FASTCKPT_FUZZ lies (default 1,000) of each kind of directory, drawn by their numbers."""
    sandbox, families, cases = Sandbox(kind, tmp_path), [], list[tuple[str, Lie]]()
    for lies in sandbox.lies(*FAMILIES):
        by_entry = defaultdict[str, list[Lie]](list)
        for lie in lies:  # long records have most of the lies, and would be drawn only
            by_entry[lie.entry].append(lie)
        families.append([*by_entry.values()])
    for number in range(int(os.environ.get("FASTCKPT_FUZZ", "1000"))):
        draw = random.Random(number)
        [family] = draw.choices(families, weights=FAMILIES.values())
        lie, action = draw.choice(draw.choice(family)), draw.choice(list(ACTIONS))
        cases.append((action, lie))
    assert not wrongs(sandbox, cases)
