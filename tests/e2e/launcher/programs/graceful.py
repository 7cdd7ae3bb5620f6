"""Workers that another's failure takes along: ranks 0 and 2 take their time to end, 2 is stopped, 3 is deaf.

After the restart each looks for survivors of the attempt before, and ends.
"""

import os
import signal
import sys
import time
from pathlib import Path

folder, rank = Path(os.environ["JOB_FOLDER"]), os.environ["RANK"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def clean_up(number: int, frame: object) -> None:
    time.sleep(0.3)
    (folder / f"cleaned.{rank}").touch()
    sys.exit(0)


if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    survivors = [pid.suffix[1:] for pid in folder.glob("pid.*") if alive(int(pid.suffix[1:]))]
    (folder / f"survivors.{rank}").write_text(" ".join(survivors))
    sys.exit()

signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == "3" else clean_up)
(folder / f"pid.{os.getpid()}").touch()
if rank == "3" and (child := os.fork()):
    (folder / f"pid.{child}").touch()
draft = folder / f"draft.{rank}.{os.getpid()}"
draft.write_text(str(os.getpid()))
draft.rename(folder / f"ready.{rank}.{os.getpid()}")
if rank == "2":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
