"""Scripts that cannot start, and scripts that only look so: real interpreters, real stderr."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastckpt_run.failures.cannot_start import broken_syntax, is_among_first_imports, why_not_started
from tests.support.tables import for_each

NO_MODULE = "ModuleNotFoundError: No module named 'nosuch'"
PARSER = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float)\n"

CANNOT_START = [
    ("no module", "import os\nimport nosuch\n", NO_MODULE),
    ("no such name", "from os import nosuch\n", "ImportError: cannot import name 'nosuch' from 'os'"),
    ("in an imported module", "import mine_without\n", NO_MODULE),
    ("raised", "try:\n    import nosuch\nexcept ImportError as e:\n    raise ImportError('x') from e", "Error: x"),
    ("before main", "def main(): pass\nif __name__ == '__main__':\n    import nosuch\n    main()\n", NO_MODULE),
    ("syntax", "def f(:\n    pass\n", "SyntaxError: invalid syntax"),
    ("syntax of a module", "import mine_broken\n", "SyntaxError: invalid syntax"),
    ("argparse", f"{PARSER}p.parse_args(['--lr', 'x'])\n", "error: argument --lr: invalid float value: 'x'"),
    ("click", "import click\n@click.command()\ndef f(): pass\nf(['--no'])\n", "Error: No such option"),
]  # fmt: skip

MAY_HAVE_BEGUN = [
    ("a lazy import", "def train():\n    for i in range(5): pass\n    import nosuch\ntrain()\n"),
    ("after what another module may have done", "import mine\nmine.run()\nimport nosuch\n"),
    ("after other code was executed", "exec('x = 1')\nimport nosuch\n"),
    ("after a context", "import warnings\nwith warnings.catch_warnings():\n    pass\nimport nosuch\n"),
    ("compiled late", "def f():\n    compile('def f(:', 'x', 'exec')\nf()\n"),
    ("a library that another rank is building", "open('halfway.so', 'w').close()\nimport halfway\n"),
    ("something printed after it", "import atexit, sys\natexit.register(print, 'x', file=sys.stderr)\nimport nosuch\n"),
    ("another exit code", "import os, sys\nprint('ImportError: x', file=sys.stderr)\nsys.exit(3)\n"),
    ("said by a spawned child", "import multiprocessing as m\nif __name__ != '__main__':\n    import nosuch\n"
     "if __name__ == '__main__':\n    p = m.get_context('spawn').Process(target=print)\n    p.start()\n    p.join()\n"
     "    exit(p.exitcode)\n"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine_without.py").write_text("import os\nimport nosuch\n")
    (tmp_path / "mine_broken.py").write_text("def f(:\n    pass\n")
    (tmp_path / "mine.py").write_text("def run(): pass\n")
    (tmp_path / "package").mkdir()
    return tmp_path


def run(folder: Path, source: str, *how: str) -> str:
    (folder / "train.py").write_text(source)
    (folder / "package" / "train.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-u", *(how or ("train.py",))], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode > 0
    return why_not_started(done.stderr, done.returncode)


def test_a_script_that_cannot_start_is_recognized_with_its_reason(folder: Path) -> None:
    for name, source, why in CANNOT_START:
        assert why in run(folder, source), name
    assert run(folder, "", "-m", "package.nosuch") == "No module named package.nosuch"


def test_a_script_that_may_have_begun_is_no_start_failure(folder: Path) -> None:
    for name, source in MAY_HAVE_BEGUN:
        assert run(folder, source) == "", name


@for_each(
    ("", 1),
    ("", 2),
    ("\n\n", 1),
    (NO_MODULE, -9),
    (f"Traceback (most recent call last):\n{NO_MODULE}", 1),
    (f'Traceback (most recent call last):\n  File "/no/such/train.py", line 1, in <module>\n{NO_MODULE}', 1),
)
def test_output_without_evidence_is_no_start_failure(words: str, exitcode: int) -> None:
    assert why_not_started(words, exitcode) == ""


def test_a_syntax_error_is_a_start_failure(folder: Path) -> None:
    assert broken_syntax(folder / "mine_broken.py").startswith("SyntaxError: invalid syntax (")
    assert broken_syntax(folder / "mine.py") == broken_syntax(folder / "none.py") == ""
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe4'\n")
    assert broken_syntax(folder / "latin.py") == ""
    (folder / "torn.py").write_bytes(b"x = '\xe4'\n")
    assert "SyntaxError" in broken_syntax(folder / "torn.py")


FRAMES = [f'  File "{name}", line {line}, in <module>' for name in (__file__, "/", "\0") for line in (3, "9" * 5000)]
PIECES = [
    "Traceback (most recent call last):",
    "usage: x",
    "x: error: y",
    NO_MODULE,
    "SyntaxError: x",
    "/x: No module named y",
]
pieces = st.sampled_from(PIECES + FRAMES)


@given(st.lists(pieces | st.text(max_size=8), max_size=8), st.sampled_from([1, 2, 0, -9]))
def test_any_output_of_a_worker_is_read_without_an_error(lines: list[str], exitcode: int) -> None:
    assert why_not_started("\n".join(lines), exitcode) in ("", *lines, "No module named y")


def test_lines_outside_the_source_are_not_among_first_imports() -> None:
    assert not is_among_first_imports("import a\n", 2)
    assert not is_among_first_imports("def f(:\n", 1)
    assert is_among_first_imports("import a\nimport b\n", 2)
