"""Time between SIGTERM and SIGKILL for workers that have to end because another one failed."""

import logging
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

from fastckpt_run.failures.deaths import DeathWatch, peek

logger = logging.getLogger("fastckpt.launcher")


def kill_group(leader: int) -> None:
    """Kill all processes of the group that the unreaped child ``leader`` leads."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def wake(leader: int) -> None:
    """Let all processes of a child's group run: stopped ones (SIGSTOP) would not hear that they are to end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGCONT)


def ask_to_end(children: Collection[int], seconds: float) -> None:
    """Send SIGTERM to children and their process groups; return when all are dead, or after so many seconds.

    The children are dead or not, but none is reaped; what the dead have left in their groups is killed.
    """
    watch = DeathWatch({child: child for child in children})
    try:
        for child in children:
            wake(child)
            _terminate(child)
        end, running = time.monotonic() + seconds, list(children)
        while running and (left := end - time.monotonic()) > 0:
            watch.wait(left)
            running = [child for child in running if peek(child) is None]
    finally:
        watch.close()
    for child in set(children).difference(running):
        kill_group(child)  # before it is reaped, and the number loses its meaning
    if running:
        logger.warning("SIGTERM did not end processes %s within %g s; killing them", running, seconds)


def _terminate(child: int) -> None:
    """SIGTERM to the group that a child leads; to itself while it leads none."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(child, signal.SIGTERM)
        except ProcessLookupError:
            os.kill(child, signal.SIGTERM)
