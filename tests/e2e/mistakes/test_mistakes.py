"""First calls of a newcomer that are wrong: each is answered by the value, the limit, and the remedy."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.in_process_saver import stop_own_saver
from tests.e2e.mistakes import data, ddp, directories, launching, loop, offloading  # noqa: F401 (they fill the table)
from tests.e2e.mistakes.answers import answer_of, grade, lacks
from tests.e2e.mistakes.table import MISTAKES, Scene
from tests.unit._core.memory.conftest import small_tmpfs  # noqa: F401 (a fixture)

GRADES = os.environ.get("MISTAKES_GRADES", "")
"""A file to which each mistake's grade and answer are appended, as JSON."""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_tmpfs, forked_launchers: None) -> Iterator[Scene]:  # noqa: F811
    monkeypatch.setenv("FASTCKPT_FLUSH_TIMEOUT", "20")
    yield Scene(str(tmp_path / "checkpoints"), monkeypatch, small_tmpfs)
    stop_own_saver()
    gc.collect()  # the traceback of a mistake holds what was open when it was made


def test_the_table_has_134_mistakes():
    assert len(MISTAKES) == 134


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_gets_an_error_with_value_limit_and_remedy(name: str, scene: Scene):
    mistake = MISTAKES[name]
    answer = answer_of(mistake.make, scene)
    if GRADES:
        with Path(GRADES).open("a") as file:
            said = {"name": name, "grade": grade(answer, mistake), "lacks": lacks(answer, mistake)}
            file.write(json.dumps(said | {"type": type(answer.error).__name__, "text": answer.text}) + "\n")
    assert not lacks(answer, mistake), answer.text
