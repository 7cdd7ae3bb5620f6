"""Finds the saver of this node; where no agent runs one, the first local rank does."""

import hashlib
import logging
import os
import sys
import threading

from fastckpt.config import Place, Settings
from fastckpt.engine.saver import Saver
from fastckpt.errors import FastckptError
from fastckpt.memory.processes import Process

logger = logging.getLogger("fastckpt")

_own: Saver | None = None
_owner = 0


def saver_address(place: Place, settings: Settings) -> str:
    """Where the saver of this node listens; starts one in this process if no launcher has and it is ours to do."""
    if place.agent:
        return place.agent
    address = _shared_address(place)
    if place.local_rank == 0:
        _start(settings, address)
    return address


def launch_of(place: Place) -> str:
    """What restarted workers have in common with those before them, and with no other launch of their script."""
    if place.agent:
        return place.agent
    starter = Process.of(os.getppid()) if place.master else Process.current()
    return f"{starter.boot} {starter.namespace} {starter.pid} {starter.ticks}"


def leave_own_saver() -> None:
    """End the saver of this process if all writers have taken leave; else that waits until this process exits."""
    if _own is not None and _own.deserted:
        stop_own_saver()


def stop_own_saver() -> None:
    """End the saver of this process, if there is one, after its last flush."""
    global _own
    if _own is not None and _owner == os.getpid():  # a forked child has none of its threads
        saver, _own = _own, None
        saver.close(failed=getattr(sys, "last_value", None) is not None)  # by an exception that nobody caught


def _start(settings: Settings, address: str) -> None:
    global _own, _owner
    if _own is not None and _owner == os.getpid():
        return
    logger.warning(
        "not started by fastckpt-run: checkpoints are persisted in the background, but nothing keeps the memory of a "
        "killed worker or flushes it. Start the script with fastckpt-run for that."
    )
    _own, _owner = Saver(settings, address), os.getpid()
    try:
        _own.start()
    except OSError as error:
        _own = None
        raise FastckptError(
            f"no saver can listen at {address}: {error}. Another job of this user seems to have the same MASTER_ADDR "
            f"and MASTER_PORT; give this one others, or start it with fastckpt-run."
        ) from error
    # Not atexit: that comes when thread pools take no more work, and the last flush is work.
    threading._register_atexit(stop_own_saver)  # type: ignore[attr-defined]


def _shared_address(place: Place) -> str:
    """An address that all local ranks of one launch compute alike; the process's own if it was launched alone."""
    if place.master:
        launch: list[object] = [place.run_id, place.master, place.restart_count, place.group_rank]
    else:
        launch = [os.getppid() if place.local_world_size > 1 else os.getpid()]
    key = hashlib.sha256(repr([os.getuid(), launch]).encode()).hexdigest()[:24]
    return f"@fastckpt-{key}"
