"""Jobs and programs that a process starts, where nothing in the environment tells them apart."""

import os
from pathlib import Path

from tests.faults.jobs import run_forked
from tests.support.forked_programs import run

PROGRAM = """
import os, sys, time
from multiprocessing import forkserver
from pathlib import Path
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fastckpt.ddp import DdpCheckpointer, StorageType

def save(folder):
    checkpointer = DdpCheckpointer(folder)
    assert checkpointer.load_checkpoint() == {}
    assert checkpointer.save_checkpoint(1, {"a": torch.ones(3)}, storage_type=StorageType.DISK)
    return checkpointer

def rank(number, folder):
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}-store", rank=number, world_size=2)
    checkpointer, end = save(folder), time.monotonic() + 60
    assert checkpointer.wait_latest_checkpoint() == 1
    Path(f"{folder}-{number}").touch()
    while len(list(Path(folder).parent.glob("*-?"))) < 4:  # until the other job has come as far
        assert time.monotonic() < end
        time.sleep(0.01)
    dist.barrier()
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.set_forkserver_preload(["torch", "fastckpt.ddp"])  # children as of mp.spawn, that import nothing themselves
    for close in ("open", "closed"):
        folder = f"{sys.argv[1]}/{close}"
        own = save(folder + "/own")
        if close == "closed":
            own.close()
        jobs = [
            mp.start_processes(rank, (f"{folder}/{number}",), nprocs=2, join=False, start_method="forkserver")
            for number in range(2)
        ]
        for job in jobs:
            while not job.join():
                pass
        own.close()
    forkserver._forkserver._stop()
"""


def test_jobs_of_mp_spawn_run_beside_each_other_and_their_parents_checkpointer(
    tmp_path: Path, forked_launchers: None
) -> None:
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
    [(code, said)] = run(tmp_path, PROGRAM, [(tmp_path,)])
    assert code == 0, said
    assert len(list(tmp_path.glob("*/*/checkpoint-1/manifest.json"))) == 6


PARENT = """
import subprocess, sys, torch
from fastckpt import Checkpointer

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
every = {"memory": 1, "storage": 5}
with Checkpointer(sys.argv[1], model=model, optimizer=optimizer, every=every) as checkpointer:
    step = checkpointer.resume()
    while step < 20:
        step += 1
        checkpointer.step(step)
        if step == 11:
            child = subprocess.run([sys.executable, *sys.argv], capture_output=True, text=True)
            print("child", child.returncode, child.stderr, flush=True)
"""


def test_a_child_that_has_the_environment_of_its_rank_is_refused_by_name(
    tmp_path: Path, forked_launchers: None
) -> None:
    program, checkpoints = tmp_path / "parent.py", tmp_path / "checkpoints"
    program.write_text(PARENT)
    said = run_forked(tmp_path, "--standalone", "--nproc-per-node", 1, program, checkpoints)
    assert "child 1" in said and "says that it is rank 0, but that is process" in said, said
    assert {"checkpoint-15", "checkpoint-20"} <= {*os.listdir(checkpoints)}
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "20"
