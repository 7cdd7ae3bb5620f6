"""`make test`: a test that fails beside the others and passes alone is named; one that fails twice fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ONCE = """
def test_once(path):
    began = path.exists()
    path.touch()
    assert began
"""


def run(folder: Path, tests: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef path(request): return request.config.rootpath / request.node.name\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_these.py").write_text("import pytest\n" + tests)
    command = [sys.executable, "-m", "tests.suite", "-p", "no:xdist"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_a_test_that_fails_once_is_named_and_the_run_passes(tmp_path):
    code, output = run(tmp_path, ONCE + "def test_good(): pass\n")
    assert code == 0, output
    assert output.endswith("passed only alone, to be mended:\n  test_these.py::test_once\n")


def test_a_test_that_fails_twice_fails_the_run(tmp_path):
    code, output = run(tmp_path, ONCE + "def test_bad(): assert 0\n")
    assert code == 1, output
    assert "1 failed, 1 passed" in output and "passed only alone" not in output


@pytest.mark.parametrize(
    "tests", ["def test_none(", "@pytest.mark.parametrize('n', range(4))\n" + ONCE.replace("path", "n, path", 1)]
)
def test_many_failures_and_errors_of_the_collection_are_not_run_again(tmp_path, tests):
    code, output = run(tmp_path, tests)
    assert code in (1, 2), output
    assert "once more" not in output
