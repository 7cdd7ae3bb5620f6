"""Processes that kill themselves at work on a checkpoint directory: at a phase, or before a file operation."""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.storage.local.directory import CheckpointDirectory

Act = Callable[[CheckpointDirectory], object]
OPERATIONS = {f"os.{name}" for name in ("rename", "link", "mkdir", "remove", "rmdir", "listdir", "scandir")}
OPERATIONS |= {"open", "shutil.rmtree"}


def die_at_operation(number: int, root: Path) -> None:
    left = number

    def is_below(event: str, arguments: tuple[Any, ...]) -> bool:
        """Whether it is of storage: nothing else here is done relative to an open directory."""
        if event == "open" and arguments[2] & os.O_PATH:
            return False  # it leads to what is opened next
        return not str(arguments[0]).startswith("/") or str(arguments[0]).startswith(str(root))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and is_below(event, arguments):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed(directory: CheckpointDirectory, act: Act, *, phase: str = "", operation: int = 0) -> bool:
    """Do something in a child that kills itself on the way; whether it came to that."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            if phase:
                metrics.observe(lambda name, _: os.kill(os.getpid(), signal.SIGKILL) if name == phase else None)
            if operation:
                die_at_operation(operation, directory.path.parent)
            act(CheckpointDirectory(directory.path))
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


def killed_at_each(folder: Path, prepare: Act, act: Act, stride: int) -> Iterator[tuple[CheckpointDirectory, bool]]:
    """Directories in which something was killed before every so many of its file operations; at last it was not."""
    for operation in itertools.count(1, stride):
        directory = CheckpointDirectory(folder / str(operation) / "root/dir")
        prepare(directory)
        was_killed = killed(directory, act, operation=operation)
        yield directory, was_killed
        if not was_killed:
            break
    assert operation > 12
