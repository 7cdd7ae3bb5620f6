"""A rank with shared memory, a child that holds it, and a program that writes a log; one rank is killed once."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

folder = Path(sys.argv[1])
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# One has a fixed name, as streaming data sets have; without it each restart could leave a file.
own = [shared_memory.SharedMemory(name, True, 1 << 16) for name in (f"{sys.argv[2]}_{rank}", None)]
with (folder / "segments").open("a") as file:
    file.writelines(f"{segment.name}\n" for segment in own)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
child.start()
# It writes all when its input has ended.
log = (folder / f"log-{rank}-{restart}").open("w")
writer = subprocess.Popen(["sort"], stdin=subprocess.PIPE, stdout=log, text=True)
assert writer.stdin
print("the last line", file=writer.stdin, flush=True)
(folder / f"child.{child.pid}").touch()
(folder / f"ready-{rank}-{restart}").touch()
while len(list(folder.glob(f"ready-?-{restart}"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if restart == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
writer.stdin.close()
writer.wait()
for segment in own:
    segment.close()
    segment.unlink()
