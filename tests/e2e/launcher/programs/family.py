"""A worker with a stubborn child, and if told so a DataLoader's; waits, deaf to SIGTERM, to be killed.

After a restart it looks for survivors of the attempt before, and ends.
"""

import os
import signal
import sys
import time
from pathlib import Path

folder = Path(os.environ["JOB_FOLDER"])


def here(pid: int) -> None:
    (folder / f"pid.{pid}").touch()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    survivors = [pid.suffix[1:] for pid in folder.glob("pid.*") if alive(int(pid.suffix[1:]))]
    (folder / f"survivors.{os.environ['RANK']}").write_text(" ".join(survivors))
    sys.exit()

signal.signal(signal.SIGTERM, signal.SIG_IGN)
here(os.getpid())
if child := os.fork():
    here(child)
else:
    time.sleep(600)
if "loader" in sys.argv:
    from torch.utils.data import DataLoader

    batches = iter(
        DataLoader(range(8), num_workers=1, worker_init_fn=lambda _: here(os.getpid()), multiprocessing_context="fork")
    )
    next(batches)
draft = folder / f"draft.{os.environ['RANK']}"
draft.write_text(str(os.getpid()))
draft.rename(folder / f"ready.{os.environ['RANK']}")  # who sees the name finds the number
time.sleep(600)
