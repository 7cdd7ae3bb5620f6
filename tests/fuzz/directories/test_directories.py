"""Directories that lie, each record in its own well-formed way: nothing outside is touched, and nothing waits."""

from pathlib import Path

import pytest

from tests.fuzz.directories.lies import REACHING, RUNNING, WAITING, Lie, of_entries, of_pickles
from tests.fuzz.directories.sandbox import Sandbox


def test_nothing_outside_a_directory_is_touched_on_the_word_of_a_file_in_it(tmp_path: Path):
    sandbox = Sandbox("left", tmp_path)
    cases = [(name, tell, action) for name, (tell, actions) in REACHING.items() for action in actions]
    found = {(name, action): sandbox.wrongs(action, Lie(name, "", tell)) for name, tell, action in cases}
    assert not {name: each for name, each in found.items() if each}


@pytest.mark.parametrize("action", WAITING)
def test_nothing_waits_for_what_is_no_file_in_a_directory(tmp_path: Path, action: str):
    sandbox = Sandbox("left", tmp_path)
    found = {lie.name: sandbox.wrongs(action, lie) for lie in of_entries(action)}
    assert not {name: each for name, each in found.items() if each}


@pytest.mark.parametrize("kind", RUNNING)
def test_no_code_in_a_directory_is_run(tmp_path: Path, kind: str):
    sandbox = Sandbox(kind, tmp_path)
    cases = [(lie, action) for lie in of_pickles(kind) for action in ("load", "resume", "look")]
    found = {(lie.name, action): sandbox.wrongs(action, lie) for lie, action in cases}
    assert not {name: each for name, each in found.items() if each}
