"""Checks, before anything is saved, that the checkpoint directory and the memory of a job can be used."""

import errno
import logging
import os
from pathlib import Path

from fastckpt._core.config import RankInfo, Settings
from fastckpt._core.error_codes import coded
from fastckpt._core.huge_pages import is_in_memory
from fastckpt._core.io.file_system import fault_in_renames, file_system_of
from fastckpt._core.io.modes import make_directory
from fastckpt._core.storage.local.layout import PRIVATE
from fastckpt._core.storage.local.stored import ours
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")


def make_ready(directory: str, place: RankInfo) -> None:
    """Make a checkpoint directory; only warns if it cannot be written to: it may be later, and memory still works.

    A failure of storage does not keep restarted workers from going on from memory.

    Raises:
        ConfigError: It is a checkpoint, a file, cannot be made, or is on a file system that tears checkpoints, when the
            job starts.
    """
    path = Path(directory)
    if not (path / PRIVATE).exists() and (inner := ours(path)) is not None:
        raise ConfigError(
            f"checkpoint_dir is {directory}, which is the checkpoint of step {inner.id.step} itself; give the "
            f"directory that it is in, such as {path.parent}, of which the newest is resumed; to go back to this one, "
            f"resume(step={inner.id.step})"
        )
    try:
        make_directory(path, parents=True)
    except OSError as error:
        if place.restart_count:
            return
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            file = next(each for each in (path, *path.parents) if each.exists())
            raise ConfigError(f"checkpoint_dir is {directory}, but {file} is a file; give a directory") from None
        raise ConfigError(
            f"checkpoint_dir is {directory}, which cannot be made: {error.strerror}; give a directory that this user "
            "can make, on a file system that is mounted for writing"
        ) from error
    if place.local_rank == 0 and not os.access(directory, os.W_OK | os.X_OK):
        why = os.strerror(errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES)
        logger.warning(
            "checkpoint_dir is %s, which cannot be written to: %s. Nothing becomes durable until it can be; memory "
            "holds what is saved. Remount it for writing, grant this user the right, or choose another directory",
            directory,
            why,
        )
    elif not place.restart_count:
        _check_file_system(path, warns=place.local_rank == 0)


def _check_file_system(directory: Path, *, warns: bool) -> None:
    """Refuse a file system on which a crash would tear checkpoints; warn of one that forgets them."""
    found = file_system_of(directory)
    if found is None:
        return
    if found.is_of_a_store:
        raise ConfigError(
            f"checkpoint_dir is {directory}, on {found.source}, an object store that is mounted as {found.kind}: it "
            "copies and deletes the files of a directory one by one to rename it, so a crash meanwhile would leave "
            "half a checkpoint. Give the URL of the store instead, such as s3://bucket/run1, or a directory on a disk "
            "with remote='s3://bucket/run1'"
        )
    if found.is_served and (fault := fault_in_renames(directory)):
        raise ConfigError(
            f"checkpoint_dir is {directory}, on {found.source}, mounted as {found.kind}: {fault}. What is published "
            "there would not be a whole checkpoint at each instant. Give a directory on another file system, or the "
            "URL of a store, such as s3://bucket/run1"
        )
    if warns and found.forgets:
        logger.warning(
            "checkpoint_dir is %s, on %s: %s. What is reported durable outlives processes, not the machine; give a "
            "directory on a disk, or a remote tier",
            directory,
            found.kind,
            found.forgets,
        )


def warn_of_disk(settings: Settings) -> None:
    """Warn if the directory for shared memory is on a disk, unless an option allows that."""
    try:
        is_memory = _is_in_memory(Path(settings.arenas))
    except OSError:
        return  # the writer will raise the error, with the reason
    if settings.memory and not is_memory:
        logger.warning(
            "shm_dir is %s, which is on a disk: each save is written there, and waits for it. Give a directory on a "
            "tmpfs, such as /dev/shm, or say that a disk is meant: --fast-no-memory (FASTCKPT_MEMORY=off)",
            settings.shm_dir,
        )


def _is_in_memory(path: Path) -> bool:
    """Return whether a file made at a path, of which the last parts may be missing, is on a tmpfs."""
    descriptor = os.open(next(each for each in (path, *path.parents) if each.exists()), os.O_RDONLY)
    try:
        return is_in_memory(descriptor)
    finally:
        os.close(descriptor)


def several_directories(one: int, directory: str, other: int, elsewhere: str) -> str:
    """The text of an error: two ranks of a node have unlike checkpoint directories."""
    return coded(
        f"rank {one} saves to {directory}, and rank {other} to {elsewhere}: a checkpoint has a part of every rank, so "
        "none would ever be whole. Give all ranks one checkpoint directory.",
        "FC-014",
    )
