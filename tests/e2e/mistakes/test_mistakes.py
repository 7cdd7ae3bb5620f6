"""First calls of a newcomer that are wrong: each is answered by the value, the limit, and the remedy."""

import contextlib
import gc
import io
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt._core.in_process_saver import stop_own_saver
from tests.e2e.ddp.conftest import said as said
from tests.e2e.mistakes import ddp, directories, loop, offloading  # noqa: F401 (they fill the table)
from tests.e2e.mistakes.table import MISTAKES, WARNING, WORKS, Scene
from tests.unit._core.memory.conftest import small_tmpfs  # noqa: F401 (a fixture)

PACKAGE = f"{Path(__file__).parents[3] / 'fastckpt'}/"


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_tmpfs, forked_launchers: None) -> Iterator[Scene]:  # noqa: F811
    monkeypatch.setenv("FASTCKPT_FLUSH_TIMEOUT", "20")
    yield Scene(str(tmp_path / "checkpoints"), monkeypatch, small_tmpfs)
    stop_own_saver()
    gc.collect()  # the traceback of a mistake holds what was open when it was made


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_gets_an_error_with_value_limit_and_remedy(name, scene, said):
    mistake, printed, error = MISTAKES[name], io.StringIO(), None
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(printed):
        warnings.simplefilter("always")
        try:
            mistake.make(scene)
        except (Exception, SystemExit) as raised:  # whatever it is, it is what a newcomer sees
            error = raised
    told = [record.message for record in said.records if record.levelname != "INFO"]
    told += [str(each.message) for each in warned if "fastckpt" in each.filename or "fastckpt" in str(each.message)]
    told += [*scene.printed, printed.getvalue()]
    if mistake.answer in (WARNING, WORKS):
        assert error is None
    else:
        assert isinstance(error, mistake.answer), told
        if not isinstance(error, SystemExit):
            told = ["".join(traceback.format_exception_only(error))]
            assert "".join(traceback.format_exception(error)).count(f'File "{PACKAGE}') <= 1, "a short traceback"
    if mistake.answer == WORKS:
        assert not [line for line in told if line.strip() and "not started by fastckpt-run" not in line]
    else:
        assert not [text for text in mistake.says.split(" | ") if not any(text in line for line in told)], told
