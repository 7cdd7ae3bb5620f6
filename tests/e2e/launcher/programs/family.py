"""Workers that wait to be ended: arguments say of which kind each rank is. A restarted one looks for survivors.

``deaf`` ignores SIGTERM and has a stubborn child; ``tidy`` and ``stopped`` clean up.
"""

import os
import signal
import sys
import time
from pathlib import Path

folder, rank = Path(os.environ["JOB_FOLDER"]), os.environ["RANK"]
kind = sys.argv[1 + int(rank)]


def here(pid: int) -> None:
    (folder / f"pid.{pid}").touch()


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

signal.signal(signal.SIGTERM, signal.SIG_IGN if kind == "deaf" else clean_up)
here(os.getpid())
if kind == "deaf":
    if child := os.fork():
        here(child)
    else:
        time.sleep(600)
draft = folder / f"draft.{rank}"
draft.write_text(str(os.getpid()))
draft.rename(folder / f"ready.{rank}")  # who sees the name finds the number
if kind == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
