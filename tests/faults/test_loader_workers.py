"""Loader workers of a fork server, which have another parent than the rank: no launch leaves them behind for good."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.jobs import Job
from tests.support.waits import until

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from fastckpt.data import ResumableDataLoader
from fastckpt.ddp import DdpCheckpointer

if __name__ == "__main__":
    out, directory, kind = Path(sys.argv[2]), *sys.argv[4:6]
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.load_checkpoint()
        loader = {"plain": DataLoader, "ours": ResumableDataLoader}[kind]
        for step, _ in enumerate(loader(torch.arange(1e6), 4, num_workers=2, multiprocessing_context="forkserver")):
            checkpointer.save_checkpoint(step, {"step": step})
            if step == 2:
                (out / f"at-{os.getpid()}").touch()
            if step > 2 and sys.argv[-1] == "last":
                break
            time.sleep(0.05)
"""


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def named_semaphores(process: psutil.Process) -> list[Path]:
    """Those of its queues, which outlive all processes unless one removes them."""
    found = [Path(each.path) for each in process.memory_maps() if "/dev/shm/sem.mp-" in each.path]
    return [path for path in found if path.exists()]


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_loader_workers_end_with_their_rank_or_by_the_next_launch(new_job, short_path: str, kind: str) -> None:
    """Those of our loader by themselves; torch's look for their parent every 5 s, find one, and stay."""
    job: Job = new_job()
    program = job.folder / "train.py"
    program.write_text(PROGRAM)
    job.start(kind, program=str(program), ranks=1, TMPDIR=short_path)
    job.until(lambda: bool([*job.folder.glob("at-*")]), "batches of both workers")
    left = psutil.Process(job.process.pid).children(recursive=True)
    assert len(left) >= 4, "the rank, its fork server and two workers"
    job.send(signal.SIGKILL)
    job.wait()
    if kind == "ours":
        until(lambda: not alive(left), "its workers end")
    else:
        time.sleep(8)
        assert alive(left), "they would end by themselves, and need nobody"
    semaphores = {path for each in alive(left) for path in named_semaphores(each)}
    assert bool(semaphores) == (kind == "plain")
    job.run(kind, "last", program=str(program), ranks=1, TMPDIR=short_path)
    assert ("such as loader workers, which" in job.text()) == (kind == "plain")
    until(lambda: not alive(left) and not any(path.exists() for path in semaphores), "nothing is left")
