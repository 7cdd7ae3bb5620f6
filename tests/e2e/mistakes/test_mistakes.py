"""First calls of a newcomer that are wrong: each is answered by the value, the limit, and the remedy."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.in_process_saver import stop_own_saver
from tests.e2e.mistakes import data, ddp, directories, launching, loop, offloading  # noqa: F401 (they fill the table)
from tests.e2e.mistakes.answers import answer_of, lacks
from tests.e2e.mistakes.table import MISTAKES, Scene
from tests.unit._core.memory.conftest import small_tmpfs  # noqa: F401 (a fixture)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_tmpfs, forked_launchers: None) -> Iterator[Scene]:  # noqa: F811
    monkeypatch.setenv("FASTCKPT_FLUSH_TIMEOUT", "20")
    yield Scene(str(tmp_path / "checkpoints"), monkeypatch, small_tmpfs)
    stop_own_saver()
    gc.collect()  # the traceback of a mistake holds what was open when it was made


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_gets_an_error_with_value_limit_and_remedy(name: str, scene: Scene):
    answer = answer_of(MISTAKES[name].make, scene)
    assert not (lacking := lacks(answer, MISTAKES[name])), (lacking, answer.text)
