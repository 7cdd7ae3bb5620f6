"""Finds the saver of this node; where no agent runs one, the first local rank does."""

import contextlib
import hashlib
import logging
import os
import sys
import threading
from pathlib import Path

import torch.distributed as dist

from fastckpt._core.config import RankInfo, Settings
from fastckpt._core.error_codes import coded
from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.saver_address import SaverAddress, find
from fastckpt._core.saver.server import Saver
from fastckpt._core.torch_private.tensors import init_method
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")

_own: Saver | None = None
_postings: dict[str, SaverAddress] = {}
"""Postings by key: a process may form one group after another, and its saver goes on."""
_owner = 0
_failed = False


def saver_address(place: RankInfo, settings: Settings) -> str:
    """The address of this node's saver; starts one in this process if no launcher has and this is the rank to do it."""
    if place.agent:
        return place.agent
    if place.local_rank == 0:
        return _start(place, settings)
    return find(Path(settings.shm_dir), _key(place))


def launch_of(place: RankInfo) -> str:
    """A name that restarted workers share with those before them, and with no other launch of their script."""
    if place.agent:
        return place.agent
    starter = Process.of(os.getppid()) if place.master else Process.current()
    return f"{starter.boot} {starter.namespace} {starter.pid} {starter.ticks}"


def leave_own_saver(*, failed: bool) -> None:
    """End the saver of this process if all writers have deregistered; else it runs until this process exits.

    ``failed`` is whether an exception ended the last writer: then the others may be waiting for this process.
    """
    global _failed
    _failed = failed
    if _own is not None and _own.deserted:
        stop_own_saver()


def stop_own_saver() -> None:
    """End the saver of this process, if there is one, after its last flush."""
    global _own, _postings
    if _own is not None and _owner == os.getpid():  # a forked child has none of its threads
        saver, postings, _own, _postings = _own, _postings, None, {}
        try:
            saver.close(failed=_failed or getattr(sys, "last_value", None) is not None)  # or one that nobody caught
        finally:
            for posting in postings.values():
                posting.close()


def _start(place: RankInfo, settings: Settings) -> str:
    global _own, _owner, _postings
    if _own is not None and _owner == os.getpid():
        _post(place, settings, _own.address)
        return _own.address
    logger.warning(
        coded(
            "not started by fastckpt-run: checkpoints are persisted in the background, but nothing keeps the memory of "
            "a killed worker or flushes it. Start the script with fastckpt-run for that.",
            "FC-010",
        )
    )
    saver = Saver(settings)
    with contextlib.ExitStack() as on_failure:
        saver.start()
        on_failure.callback(saver.close)
        _postings = {}  # those of a process that has forked this one stay as they are
        _post(place, settings, saver.address)
        on_failure.pop_all()
    _own, _owner = saver, os.getpid()
    # Not atexit: that runs when thread pools take no more work, and the last flush needs them.
    threading._register_atexit(stop_own_saver)  # type: ignore[attr-defined]
    return saver.address


def _post(place: RankInfo, settings: Settings, address: str) -> None:
    """Let the other local ranks find the saver by the key that they compute now."""
    if place.local_world_size == 1 or (key := _key(place)) in _postings:
        return
    try:
        _postings[key] = SaverAddress(Path(settings.shm_dir), key, address)
    except OSError as error:
        raise FastckptError(
            f"the address of the saver cannot be posted under {settings.shm_dir}: {error}. Choose a tmpfs that this "
            f"user can write to with FASTCKPT_SHM_DIR."
        ) from error


def _key(place: RankInfo) -> str:
    """A key that all local ranks of one launch compute alike, and no other launch does."""
    if place.master:
        launch: list[object] = [place.run_id, place.master, place.restart_count, place.group_rank]
    else:
        launch = [os.getppid() if place.local_world_size > 1 else os.getpid()]
    if place.local_world_size > 1 and dist.is_initialized():  # one process may start several jobs at once
        launch.append(init_method())
    return hashlib.sha256(repr([os.getuid(), launch]).encode()).hexdigest()[:24]
