"""Removing a folder in which somebody still makes and removes files, such as the memory of a job that runs."""

import shutil
import time
from pathlib import Path

SECONDS = 10


def remove_live(folder: Path) -> None:
    """Remove it with all that is in it, and what is put there meanwhile; an error if others are quicker for 10 s."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError:  # a file came after the folder was listed, or went
            if not folder.exists():
                return None
            if time.monotonic() > end:
                raise
