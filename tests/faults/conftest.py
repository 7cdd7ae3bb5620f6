"""Jobs that are ended with their test, and runs that nothing befell to compare them with."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import Job

_references: dict[tuple[int, tuple[str, ...]], Job] = {}


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def new(name: str = "job", checkpoint_dir: Path | None = None) -> Job:
        jobs.append(Job(tmp_path / name, checkpoint_dir))
        return jobs[-1]

    yield new
    for job in jobs:
        job.end()


@pytest.fixture
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """The run of so many ranks with these arguments that nothing befell; made once."""

    def reference(*script: str, ranks: int = 2) -> Job:
        key = ranks, script
        if key not in _references:
            _references[key] = Job(tmp_path_factory.mktemp("uninterrupted")).run(*script, ranks=ranks)
        return _references[key]

    return reference
