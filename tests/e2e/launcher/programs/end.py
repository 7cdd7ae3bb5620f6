"""End as the first argument says; rank 1, if there is one, waits to be stopped, and cleans up if asked to."""

import os
import signal
import sys
import time
from pathlib import Path

how, folder, rank = sys.argv[1], Path(os.environ["JOB_FOLDER"]), os.environ["RANK"]
(folder / f"pid.{os.getpid()}").touch()


def clean_up(number: int, frame: object) -> None:
    time.sleep(0.3)
    (folder / f"cleaned.{rank}").touch()
    sys.exit(0)


def fail() -> None:
    raise ValueError("MARK")


def main() -> None:
    if how == "wait":
        signal.signal(signal.SIGTERM, clean_up)
        (folder / f"ready.{rank}").touch()
        time.sleep(600)
    if rank == "1" and how != "well":
        (folder / "ready.1").touch()
        time.sleep(600)
    if os.environ["WORLD_SIZE"] == "2" and how != "well":
        while not (folder / "ready.1").exists():
            time.sleep(0.02)
    if how == "raise":
        fail()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "three":
        sys.exit(3)


if "recorded" in sys.argv and rank == "0":
    from torch.distributed.elastic.multiprocessing.errors import record

    main = record(main)
main()
