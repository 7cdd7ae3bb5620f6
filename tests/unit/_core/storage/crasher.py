"""Publishes and deletes in forked children that kill themselves: requests and replies are lines of JSON.

A request is {root, deed, id, target, phase, operation}: the child dies when ``phase`` begins, or before its
``operation``-th file operation. The reply is the child's wait status: 9 if it died so, 0 if it came to its end.
"""

import json
import os
import signal
import sys
import time
from typing import Any

from checkpoints import contribute, publish

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.share import Share

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


def act(request: dict) -> None:
    directory, id = CheckpointDirectory(request["root"]), SaveId(*request["id"])
    if request.get("phase"):
        die_at_phase(request["phase"])
    if request.get("operation"):
        die_at_operation(request["operation"], request["root"])
    match request["deed"]:
        case "publish":
            publish(directory, id, request.get("target", ""))
        case "delete":
            directory.delete(id)
        case "sweep":
            directory.sweep()
        case "node":
            share = Share(request["node"], request["nodes"], target=request.get("target", ""))
            contribution, end = contribute(directory, id, share), time.monotonic() + 60
            while contribution.complete() is None and request.get("waits"):
                assert time.monotonic() < end, contribution.missing()
        case "quarantine":
            [bad] = [stored for stored in directory.checkpoints() if stored.id == id]
            directory.quarantine(bad, "it is bad")


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            act(json.loads(line))
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
