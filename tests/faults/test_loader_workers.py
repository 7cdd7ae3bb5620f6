"""Loader workers of a fork server, which have another parent than the rank: no launch leaves them behind for good."""

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.jobs import launcher_for
from tests.support import launchers

pytestmark = pytest.mark.usefixtures("forked_launchers")

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from fastckpt.data import ResumableDataLoader
from fastckpt.ddp import DdpCheckpointer

if __name__ == "__main__":
    out, kind, first = Path(sys.argv[1]), {"plain": DataLoader, "ours": ResumableDataLoader}[sys.argv[2]], sys.argv[3]
    with DdpCheckpointer(out / "checkpoints") as checkpointer:
        checkpointer.load_checkpoint()
        loader = kind(torch.arange(1e6), 4, num_workers=2, multiprocessing_context="forkserver")
        for step, _ in enumerate(loader):
            checkpointer.save_checkpoint(step, {"step": step})
            if step == 2:
                (out / f"at-{os.getpid()}").touch()
            if step > 2 and not first:
                break
            time.sleep(0.05)
"""


def launch(folder: Path, kind: str, first: str) -> subprocess.Popen[bytes]:
    (folder / "train.py").write_text(PROGRAM)
    command = [*launcher_for(folder), "--nproc_per_node=1", str(folder / "train.py"), str(folder), kind, first]
    variables = os.environ | {"TMPDIR": str(folder), "FASTCKPT_PRELOAD": "auto"}
    with (folder / "output").open("a") as output:  # no pipe: what is left behind keeps it open, and writes to it
        return launchers.start(command, variables, output.fileno())


def killed_agent(folder: Path, kind: str) -> list[psutil.Process]:
    """The descendants of a launch whose agent is killed while it trains."""
    job, end = launch(folder, kind, "first"), time.monotonic() + 120
    while not [*folder.glob("at-*")]:
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    descendants = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    job.wait()
    return descendants


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def named_semaphores(process: psutil.Process) -> list[Path]:
    """Those of its queues, which outlive all processes unless one removes them."""
    found = [Path(each.path) for each in process.memory_maps() if "/dev/shm/sem.mp-" in each.path]
    return [path for path in found if path.exists()]


def test_loader_workers_of_our_loader_end_with_their_rank(tmp_path: Path):
    descendants, end = killed_agent(tmp_path, "ours"), time.monotonic() + 60
    assert len(descendants) >= 4, "the rank, its fork server and two workers"
    while alive(descendants):
        assert time.monotonic() < end, alive(descendants)
        time.sleep(0.1)
    assert launch(tmp_path, "ours", "").wait(120) == 0, (tmp_path / "output").read_text()


def test_the_next_launch_ends_loader_workers_of_a_plain_loader(tmp_path: Path):
    descendants = killed_agent(tmp_path, "plain")
    time.sleep(8)  # torch's workers look for their parent every 5 s
    assert alive(descendants), "they would end by themselves, and need nobody"
    semaphores = {path for each in alive(descendants) for path in named_semaphores(each)}
    assert semaphores
    job = launch(tmp_path, "plain", "")
    code, said = job.wait(120), (tmp_path / "output").read_text()
    assert code == 0, said
    assert "such as loader workers, which" in said
    end = time.monotonic() + 30
    while alive(descendants) or any(path.exists() for path in semaphores):
        assert time.monotonic() < end, (alive(descendants), semaphores)
        time.sleep(0.1)
