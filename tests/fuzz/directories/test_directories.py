"""Directories that lie, each record in its own well-formed way: nothing outside is touched, and nothing waits."""

import os
from pathlib import Path

import pytest

from tests.fuzz.directories import campaign
from tests.fuzz.directories.lies import Lie, of_entries, of_pickles
from tests.fuzz.directories.sandbox import Sandbox
from tests.fuzz.directories.saved import SAVES
from tests.fuzz.directories.telling import REACHING, RUNNING, TOGETHER, WAITING

SLOW_S = 60.0
"""What has not ended then waits for ever: a machine with much to do is slow."""


def test_nothing_outside_a_directory_is_touched_on_the_word_of_a_file_in_it(tmp_path: Path):
    sandbox = Sandbox("left", tmp_path, SLOW_S)
    found = {name: sandbox.wrongs(action, Lie(name, "", tell)) for name, (action, tell) in REACHING.items()}
    assert not {name: each for name, each in found.items() if each}


@pytest.mark.usefixtures("forked_launchers")
def test_a_launched_job_resumes_beside_lies_and_touches_nothing_outside(tmp_path: Path):
    assert not Sandbox("left", tmp_path, SLOW_S).launched(TOGETHER)


@pytest.mark.parametrize("action", WAITING)
def test_nothing_waits_for_what_is_no_file_in_a_directory(tmp_path: Path, action: str):
    sandbox = Sandbox("left", tmp_path, SLOW_S)
    [lies] = sandbox.lies(of_entries)
    found = {lie.name: sandbox.wrongs(action, lie) for lie in lies if lie.name in WAITING[action]}
    assert found.keys() == set(WAITING[action])
    assert not {name: each for name, each in found.items() if each}


@pytest.mark.parametrize("kind", RUNNING)
def test_no_code_in_a_directory_is_run(tmp_path: Path, kind: str):
    sandbox = Sandbox(kind, tmp_path, SLOW_S)
    [lies] = sandbox.lies(of_pickles)
    cases = [(lie, action) for lie in lies if lie.name in RUNNING[kind] for action in ("load", "resume", "look")]
    found = {(lie.name, action): sandbox.wrongs(action, lie) for lie, action in cases}
    assert len(found) == 3 * len(RUNNING[kind])
    assert not {name: each for name, each in found.items() if each}


@pytest.mark.campaign
def test_a_campaign_of_lies_leaves_all_outside_as_it_was(tmp_path: Path):
    """FASTCKPT_FUZZ lies (default 2,000)."""
    cases = int(os.environ.get("FASTCKPT_FUZZ", "2000"))
    assert campaign.run(0, cases, list(SAVES), tmp_path) == 0
