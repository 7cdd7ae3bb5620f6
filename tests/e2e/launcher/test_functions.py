"""An agent whose workers run a function, with arguments or without, as torch's elastic agent takes it."""

from pathlib import Path

from tests.e2e.launcher.conftest import Jobs, program


def test_workers_run_functions_with_and_without_arguments(jobs: Jobs) -> None:
    done = jobs.run(launcher=Path(program("functions.py")).read_text())
    assert done.stdout.splitlines() == [
        "compute [0, 4]",
        "add [(0, 5), (1, 6)]",
        "sad FAILED ['RuntimeError: sad because i throw']",
        "killed [(0, 0), (1, 1)]",
    ]
