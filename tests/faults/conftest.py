"""Jobs that are ended with their test, and runs that nothing befell to compare them with."""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import Job


class Jobs:
    """Makes the jobs of a test, and ends those that still run when it has failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Job] = []

    def __call__(self, name: str = "job", checkpoint_dir: Path | None = None) -> Job:
        self._made.append(Job(self._folder / name, checkpoint_dir))
        return self._made[-1]

    def end(self) -> None:
        for job in self._made:
            job.end()


@pytest.fixture
def new_job(tmp_path: Path, forked_launchers: None) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.end()


def reference_runs(program: str, *always: str, **options: Any) -> Any:
    """A fixture: the run of a program, of so many ranks with these arguments, that nothing befell.

    It is made once, whoever of the processes of these tests asks first. ``always`` are arguments of each, ``options``
    those of `Job.run`.
    """

    @pytest.fixture
    def uninterrupted(tmp_path_factory: pytest.TempPathFactory, forked_launchers: None) -> Callable[..., Job]:
        own = tmp_path_factory.getbasetemp()
        common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

        def reference(*script: str, ranks: int = 2, program: str = program) -> Job:
            path = Path(program)
            text = "-".join(["uninterrupted", path.parent.name, path.name, str(ranks), *script])
            job = Job(common / re.sub(r"[^\w.=-]", "_", text))
            with (job.folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not job.ends():
                    job.run(*script, *always, ranks=ranks, program=program, **options)
            return job

        return reference

    return uninterrupted


uninterrupted = reference_runs("train.py")
