"""Pods that end with their test, and jobs in their containers."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.containers.containers import Container, Pod, python
from tests.faults.conftest import uninterrupted  # noqa: F401 (a fixture)
from tests.faults.jobs import HERE, Job
from tests.nodes.conftest import NewCluster, new_cluster  # noqa: F401 (a fixture)


class ContainerJob(Job):
    """A job of tests/faults whose launches are containers of one pod."""

    pod: Pod

    def begin(self, *script: str, launcher: tuple[str, ...] = (), ranks: int = 2, **options: Any) -> Container:
        """Start a container with fastckpt-run as its first process, or with what else is given to start it."""
        self.launches += 1
        shape = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "2")
        arguments = ("--out", str(self.folder), "--checkpoint-dir", str(self.checkpoint_dir), *script)
        command = [*(launcher or python("-m", "fastckpt_run")), *shape, str(HERE / "train.py"), *arguments]
        return self.launch(command, **options)

    def launch(self, command: Sequence[str], **options: Any) -> Container:
        environment = os.environ | self._environment() | {"FASTCKPT_SHM_DIR": "/dev/shm"}
        container = self.pod.start(*command, output=self.output, environment=environment, **options)
        self.process = container.process
        return container

    def held(self) -> list[str]:
        return self.pod.host.run("ls", "-A", "/dev/shm").split()

    def tiers(self) -> list[tuple[int, str]]:
        """Step and tier of each resume of rank 0."""
        return self.resumes()[1:]


@pytest.fixture
def job(tmp_path: Path, new_cluster: NewCluster) -> ContainerJob:  # noqa: F811
    job = ContainerJob(tmp_path / "job")
    job.pod = Pod(new_cluster(0))
    return job
