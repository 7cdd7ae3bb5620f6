"""Raise, or exit with 3, as the first argument says; rank 1, if there is one, waits to be stopped."""

import os
import sys
import time
from pathlib import Path

how, folder, rank = sys.argv[1], Path(os.environ["JOB_FOLDER"]), os.environ["RANK"]
(folder / f"pid.{os.getpid()}").touch()


def fail() -> None:
    raise ValueError("MARK")


def main() -> None:
    if rank == "1":
        (folder / "ready.1").touch()
        time.sleep(600)
    while os.environ["WORLD_SIZE"] == "2" and not (folder / "ready.1").exists():
        time.sleep(0.01)
    if how == "raise":
        fail()
    sys.exit(3)


if "recorded" in sys.argv and rank == "0":
    from torch.distributed.elastic.multiprocessing.errors import record

    main = record(main)
main()
