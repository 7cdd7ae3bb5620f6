"""A container is ended by SIGTERM: the one test of containers in each run, which proves that pods work here."""

import signal

from tests.containers.conftest import ContainerJob
from tests.containers.containers import python
from tests.e2e.launcher.conftest import FORK


def test_sigterm_to_a_container_ends_it_flushed(job: ContainerJob) -> None:
    # A shell executes its last command, so that fastckpt-run is the first process.
    shell = ("sh", "-c", 'cd / && exec "$0" "$@"', *python("-m", "fastckpt_run", *FORK))
    container = job.begin("--stop-at", "8", "--disk", "1000", launcher=shell, ranks=1)
    job.wait_for("waiting", 8)
    container.signal(signal.SIGTERM)
    assert container.wait() == 1, job.text()
    assert job.stored() == [8] and "stopped by SIGTERM" in job.text() and not job.held()
