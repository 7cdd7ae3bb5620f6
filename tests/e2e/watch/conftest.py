"""One job of two workers that is watched by all means, whose rank 1 is killed, and what was seen of it."""

import os
import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import launchers
from tests.support.ports import free_port

PROGRAM = Path(__file__).parent / "train.py"
DEADLINE = 120.0
STEP_SECONDS = 0.01
CHECKPOINTS = "checkpoints"


@dataclass
class Scraper:
    """Asks for the page again and again; has ``found`` so many answers."""

    port: int = 0
    found: list[str] = field(default_factory=list)

    def scrape(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            self.found.append(answer.read().decode())

    @property
    def newest(self) -> str:
        return self.found[-1] if self.found else ""


@dataclass
class WatchedJob:
    """A job that has ended.

    Attributes:
        folder: Has its checkpoints, and a folder ``tensorboard``.
        scrapes: What one reader found, in order.
    """

    folder: Path
    output: str
    scrapes: list[str]

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS


def until(condition: Callable[[], object], what: str, text: Callable[[], str]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {DEADLINE} s:\n{text()}"
        time.sleep(0.01)


@pytest.fixture(scope="package")
def watched(tmp_path_factory: pytest.TempPathFactory, forked_launchers: None) -> Iterator[WatchedJob]:
    """Scraped from before its first worker to its end, by one that reads, and one that never does."""
    folder = tmp_path_factory.mktemp("watched")
    shm = Path("/dev/shm") / f"fastckpt-watched-{os.getpid()}"
    shm.mkdir(mode=0o700)
    scraper = Scraper(free_port())
    options = {
        "FASTCKPT_SHM_DIR": str(shm), "TMPDIR": str(folder), "FASTCKPT_METRICS_PORT": str(scraper.port),
        "FASTCKPT_TENSORBOARD": str(folder / "tensorboard"), "FASTCKPT_PRELOAD": "auto", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{Path(__file__).parents[2] / 'start'}{os.pathsep}{Path(__file__).parents[3]}",
    }  # fmt: skip
    command = ["-m", "fastckpt_run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    with (folder / "output").open("wb") as output:
        arguments = [*command, str(PROGRAM), str(folder), str(STEP_SECONDS)]
        job = launchers.start(arguments, os.environ | options, output.fileno())
    dead = socket.socket()
    try:
        yield _watch(job, folder, scraper, dead)
    finally:
        dead.close()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        shutil.rmtree(shm, ignore_errors=True)


def _watch(job, folder: Path, scraper: Scraper, dead: socket.socket) -> WatchedJob:
    def text() -> str:
        return (folder / "output").read_text(errors="replace")

    def reaches(step: int) -> bool:
        assert job.poll() is None, text()
        scraper.scrape()
        lines = dict(line.rsplit(" ", 1) for line in scraper.newest.splitlines() if not line.startswith("#"))
        return float(lines.get("fastckpt_step", 0)) >= step and float(lines["fastckpt_workers"]) == 2

    def serves() -> bool:
        assert job.poll() is None, text()
        try:
            scraper.scrape()
        except OSError:
            return False
        return True

    until(serves, "the page", text)
    dead.connect(("127.0.0.1", scraper.port))
    dead.sendall(b"GET /metrics HTTP/1.0\r\n")  # it never ends its request, nor reads
    until(lambda: reaches(40), "step 40", text)
    os.kill(int((folder / "pid.1").read_text()), signal.SIGKILL)
    until(lambda: "died: SIGKILL" in text() or serves() is None, "the restart", text)
    until(lambda: reaches(120), "step 120", text)
    (folder / "stop").touch()
    while job.poll() is None:
        try:
            scraper.scrape()
        except OSError:
            break
    assert job.wait(DEADLINE) == 0, text()
    return WatchedJob(folder, text(), scraper.found)
