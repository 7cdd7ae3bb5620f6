"""Has this process kill itself at a phase of a publication, or before one of its file operations."""

import os
import signal
import sys
from typing import Any

from fastckpt._core import metrics

OPERATIONS = {f"os.{name}" for name in ("rename", "link", "mkdir", "remove", "rmdir", "listdir", "scandir")}
OPERATIONS |= {"open", "shutil.rmtree"}


def die_at_phase(phase: str) -> None:
    metrics.observe(lambda name, fields: os.kill(os.getpid(), signal.SIGKILL) if name == phase else None)


def die_at_operation(number: int, root: str) -> None:
    left = number

    def is_below(event: str, arguments: tuple[Any, ...]) -> bool:
        """Whether it is of storage: nothing else here is done relative to an open directory."""
        if event == "open" and arguments[2] & os.O_PATH:
            return False  # it leads to what is opened next
        return not str(arguments[0]).startswith("/") or str(arguments[0]).startswith(os.path.dirname(root))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and is_below(event, arguments):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
