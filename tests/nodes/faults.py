"""Faults that happen to hosts while one of them stands still in a phase."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.nodes.job import NodesJob

PAUSES = str(Path(__file__).parent / "pauses")
AT = 2
"""The host that stands still; it is a fresh one, or is in a phase of a copy."""
Fault = Callable[[NodesJob], None]


class Pause:
    """A pause of one process of a host that is launched now, when it comes to a phase for the first, or n-th, time."""

    def __init__(self, job: NodesJob, number: int, phase: str, nth: int = 1, *, parks: bool = False) -> None:
        self._folder = job.out / f"pause-{time.monotonic_ns()}"
        self._folder.mkdir()
        pause = {"PHASE": phase, "FOLDER": str(self._folder), "NTH": str(nth)}
        environment = {f"NODES_PAUSE_{name}": value for name, value in pause.items()}
        (job.park if parks else job.launch)(number, PYTHONPATH=PAUSES, **environment)
        self._job, self._phase = job, phase

    def is_reached(self) -> "Pause":
        self._job.until((self._folder / "reached").exists, f"phase {self._phase}")
        return self

    def end(self) -> None:
        (self._folder / "go").touch()


def kill_the_agent(job: NodesJob) -> None:
    job.kill_node(AT)
    job.launch(AT)


def lose_the_host(job: NodesJob) -> None:
    job.lose(AT)
    job.add(AT)


def lose_another(job: NodesJob) -> None:
    job.lose(1)
    job.add(1)


def kill_the_source(job: NodesJob) -> None:
    """That holds the store and rank 0, too."""
    job.kill_node(0)
    job.launch(0)


def kill_another_worker(job: NodesJob) -> None:
    job.kill_worker(1)


def cut_the_link(job: NodesJob) -> None:
    """Of the host, for longer than nodes may be silent."""
    job.cluster.hosts[AT].unplug()
    time.sleep(5)
    job.cluster.hosts[AT].plug()


FLIP = """
import pathlib, sys
for path in pathlib.Path('/dev/shm').glob(sys.argv[1]):
    with path.open('r+b') as file:
        data = bytearray(file.read()); data[len(data) // 2] ^= 1; file.seek(0); file.write(data)
        print(path, flush=True)
"""


def flip(job: NodesJob, number: int, pattern: str) -> None:
    """Flip a byte of each file of the memory of a host whose path matches."""
    flipped = job.out / f"flipped.{number}"
    assert job.cluster.hosts[number].start("-c", FLIP, pattern, output=flipped).wait(60) == 0
    assert flipped.read_text(), "there is no such file"


def flip_a_byte_at_the_source(job: NodesJob) -> None:
    flip(job, 0, "**/model.pt*")
