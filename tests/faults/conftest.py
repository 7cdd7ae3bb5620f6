"""Jobs that are ended with their test, and runs that nothing befell to compare them with."""

import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import PATH
from tests.faults.jobs import Job
from tests.support import launchers

MODULES = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
FRAMEWORKS = {"DS_ACCELERATOR": "cpu", "MALLOC_PERTURB_": "90", "TQDM_DISABLE": "1"}
"""The environment of jobs with frameworks. DeepSpeed pads partitions with what is in memory: the same in each run."""


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


@pytest.fixture(scope="session")
def forked_launchers() -> Iterator[None]:
    """Launchers have what sharded programs import as well."""
    with launchers.forked(os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}, MODULES):
        yield


@pytest.fixture(scope="session")
def forked_frameworks() -> Iterator[None]:
    """Launchers of jobs with frameworks, which are imported once for all."""
    environment = os.environ | FRAMEWORKS | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
    with launchers.forked(environment, ["tests.support.frameworks"]):
        yield


@pytest.fixture(scope="module", autouse=True)
def imported_frameworks(request: pytest.FixtureRequest) -> None:
    """Frameworks are imported before a test looks for what it leaves behind, in modules whose tests use them."""
    mine = [item for item in request.session.items if item.path == request.path]
    if any(item.get_closest_marker("frameworks") for item in mine):
        request.getfixturevalue("forked_frameworks")


def common_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder that all processes of these tests have in common."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def made_once(folder: Path) -> Iterator[None]:
    """Whoever of these processes comes first makes what is in a folder; the others wait."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def new_job(tmp_path: Path, forked_launchers: None) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.end()


@pytest.fixture
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, forked_launchers: None) -> Callable[..., Job]:
    """The run of a program, of so many ranks with these arguments, that nothing befell; of train.py by default."""

    def reference(*script: str, ranks: int = 2, program: str = "train.py", **options: str) -> Job:
        path = Path(program)
        text = "-".join(["uninterrupted", path.parent.name, path.name, str(ranks), *script])
        folder = common_folder(tmp_path_factory, re.sub(r"[^\w.=-]", "_", text))
        with made_once(folder):
            if not (job := Job(folder)).ends():
                job.run(*script, ranks=ranks, program=program, **options)
        return job

    return reference


@pytest.fixture
def short_path() -> Iterator[str]:
    """A temporary directory whose name leaves room for those of sockets, which the loader's workers make in it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
        yield path
