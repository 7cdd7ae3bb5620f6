"""Jobs and programs that a process starts, where nothing in the environment tells them apart."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PROGRAM = """
import os, sys, time
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
        time.sleep(0.05)
    dist.barrier()
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    folder, close = sys.argv[1:]
    own = save(folder + "/own")
    if close == "closed":
        own.close()
    jobs = [mp.spawn(rank, (f"{folder}/{number}",), nprocs=2, join=False) for number in range(2)]
    for job in jobs:
        while not job.join():
            pass
    own.close()
"""


def test_jobs_of_mp_spawn_run_beside_each_other_and_their_parents_checkpointer(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    variables |= {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    for close in ("open", "closed"):
        folder = tmp_path / close
        command = [sys.executable, str(program), str(folder), close]
        folder.mkdir()
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert len(list(folder.glob("*/checkpoint-1/manifest.json"))) == 3


PARENT = """
import subprocess, sys, torch
from fastckpt import Checkpointer

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Checkpointer("checkpoints", model=model, optimizer=optimizer, every={"memory": 1, "storage": 5}) as checkpointer:
    step = checkpointer.resume()
    while step < 20:
        step += 1
        checkpointer.step(step)
        if step == 11:
            child = subprocess.run([sys.executable, *sys.argv], capture_output=True, text=True)
            print("child", child.returncode, child.stderr, flush=True)
"""


def test_a_child_that_has_the_environment_of_its_rank_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fastckpt_run", "--standalone", "--nproc-per-node", "1", "parent.py"]
    options = {"env": variables | {"TMPDIR": str(tmp_path)}, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, cwd=tmp_path, check=False, **options)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "child 1" in said and "says that it is rank 0, but that is process" in said, said
    assert sorted(path.name for path in tmp_path.glob("checkpoints/checkpoint-*"))[-2:] == [
        "checkpoint-15",
        "checkpoint-20",
    ]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "20"
