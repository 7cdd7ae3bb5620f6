"""Worker processes of the agent: their program, the request to end, and the kill."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed.run as torchrun
from torch import multiprocessing

from fastckpt_run.failures.deaths import DeathWatch, peek
from fastckpt_run.parent_death import die_with

logger = logging.getLogger("fastckpt.launcher")


def run_script_path(training_script: str, *script_args: str) -> None:
    """torchrun's function of this name, in a session of its own as other workers have, bound to the agent."""
    # A new session, whose group is the worker's own: torch starts functions in the agent's.
    os.setsid()
    if (agent := multiprocessing.parent_process()) is not None:
        # The death signal comes from the parent: with a fork server that is another process than the agent.
        if agent.pid == os.getppid():
            die_with(agent.pid)
        else:  # a fork server stands in between, and lives as long as its children
            threading.Thread(target=_die_after, args=(agent,), daemon=True).start()
    try:
        torchrun.run_script_path(training_script, *script_args)
    except SystemExit as end:
        if end.code is not None:  # sys.exit() without a code: torch would wait for its result without end
            raise


def _die_after(agent: BaseProcess) -> None:
    agent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def continue_group(leader: int) -> None:
    """Let all processes of a child's group run: stopped ones (SIGSTOP) would not receive SIGTERM."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGCONT)


def terminate_gracefully(children: Collection[int], seconds: float) -> None:
    """Send SIGTERM to children and their process groups; return when all are dead, or after so many seconds.

    The children are dead or not, but none is reaped.
    """
    # pidfds made before the signal: no death can be missed.
    watch = DeathWatch({child: child for child in children})
    try:
        for child in children:
            continue_group(child)
            _terminate(child)
        end, running = time.monotonic() + seconds, list(children)
        while running and (left := end - time.monotonic()) > 0:
            watch.wait(left)
            running = [child for child in running if peek(child) is None]
    finally:
        watch.close()
    if running:
        logger.warning("SIGTERM did not end processes %s within %g s; killing them", running, seconds)


def _terminate(child: int) -> None:
    """SIGTERM to the group that a child leads; to itself while it leads none."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(child, signal.SIGTERM)
        except ProcessLookupError:
            os.kill(child, signal.SIGTERM)


def drop_if_torn(error_file: Path) -> None:
    """Remove the error file of a worker that was killed while it wrote it; torch would raise on it."""
    if not error_file.is_file():
        return
    try:
        json.loads(error_file.read_bytes())
    except ValueError:
        logger.warning("%s is incomplete: its worker was killed while it wrote it", error_file)
        error_file.unlink()
