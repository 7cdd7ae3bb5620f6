"""Jobs that a process starts, where nothing in the environment tells them apart."""

from pathlib import Path

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

def rank(number, folder, world, ranks):
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{folder}-store", rank=number, world_size=world)
    checkpointer, end = save(folder), time.monotonic() + 60
    assert checkpointer.wait_latest_checkpoint() == 1
    Path(f"{folder}-{number}").touch()
    while len(list(Path(folder).parent.glob("*-?"))) < ranks:  # until the other job has come as far
        assert time.monotonic() < end
        time.sleep(0.01)
    dist.barrier()
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.set_forkserver_preload(["torch", "fastckpt.ddp"])  # children as of mp.spawn, that import nothing themselves
    for close, worlds in (("open", (2, 1)), ("closed", (1,))):
        folder = f"{sys.argv[1]}/{close}"
        own = save(folder + "/own")
        if close == "closed":
            own.close()
        jobs = [
            mp.start_processes(
                rank, (f"{folder}/of-{world}", world, sum(worlds)), world, join=False, start_method="forkserver"
            )
            for world in worlds
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
    assert len(list(tmp_path.glob("*/*/checkpoint-1/manifest.json"))) == 5
