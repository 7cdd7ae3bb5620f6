"""Chooses where a launch has its arenas, and finds checkpoints that launches with another place left there."""

import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

from fastckpt._core.config import Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.arena import arena_path, arena_paths, owner_of
from fastckpt._core.memory.census import ArenaEntry, ArenaState, census
from fastckpt._core.memory.headroom import lies_in_memory
from fastckpt._core.memory.processes import boot_id
from fastckpt._core.storage.store import is_url
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")


def place(settings: Settings) -> Path:
    """The directory under which arenas are made; raises ConfigError if it is missing, or contradicts an option."""
    directory = Path(settings.arenas)
    try:
        in_memory = lies_in_memory(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written to")
    except OSError as error:
        raise ConfigError(
            f"no checkpoints can be held under {directory}: {error.strerror}. Name another with --fast-shm-dir"
        ) from error
    # A tmpfs counts against the memory that --fast-no-memory is to spare.
    if in_memory and not settings.memory:
        raise ConfigError(
            f"--fast-no-memory was given, but {directory} is a tmpfs, which is memory. Name a directory on a disk "
            f"with --fast-shm-dir, or with TMPDIR"
        )
    return directory


def arena_of(settings: Settings, directory: str, agent_slot: int) -> Path:
    """Return the path of a launch's arena for a checkpoint directory; names that others have taken are reported."""
    where = str(place(settings)), directory, agent_slot
    path = arena_path(*where)
    taken = {each: owner for each in arena_paths(*where) if (owner := owner_of(each)) not in (None, os.getuid())}
    if taken and path not in taken:
        first, owner = next(iter(taken.items()))
        text = "%s was made by user %s, under the name of this user's memory for %s, which is in %s instead"
        logger.warning(f"{text}; root can remove it", first, owner, directory, path)
    return path


def copies_place(settings: Settings, checkpoint_dir: str = "") -> Path | None:
    """The directory on a disk for large copies of other hosts' files; None if they are kept with the arena.

    Raises ConfigError if it is not there, cannot be written to, or is in the checkpoint directory.
    """
    if (directory := settings.copies_directory) is None:
        return None
    try:
        lies_in_memory(directory)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written to")
    except OSError as error:
        raise ConfigError(
            f"no copies can be kept in {directory}: {error.strerror}. Make it on a disk of this host, or name another "
            "with --fast-replica-medium disk:DIR"
        ) from error
    directory = directory.resolve()
    if checkpoint_dir and not is_url(checkpoint_dir) and directory.is_relative_to(checkpoint_dir):
        raise ConfigError(
            f"copies would be kept in {directory}, which is in the checkpoint directory {checkpoint_dir}. Name a "
            "directory on a disk of this host with --fast-replica-medium disk:DIR"
        )
    return directory


def memory_id(settings: Settings) -> str:
    """Return an id that processes share exactly if their arenas are in the same memory."""
    try:
        status = Path(settings.arenas).stat()
    except OSError:  # `place` raises it once there is something to hold
        return f"{boot_id()} {settings.arenas}"
    return f"{boot_id()} {status.st_dev} {status.st_ino}"


def left_elsewhere(settings: Settings, arena: Path, directory: str, newest: SaveId | None) -> list[str]:
    """Checkpoints newer than ``newest`` that a launch has left where it had its arena, and this one has not.

    Args:
        settings: Settings of this launch.
        arena: Arena of this launch.
        directory: The checkpoint directory.
        newest: The newest that it knows of.
    """
    places = [place for place in settings.elsewhere if (Path(place) / arena.name).is_dir()]
    ours = [entry for entry in _census(arena.parent) if entry.path == arena] if places else []
    found = [
        f"{entry.newest} in {entry.path} (left by another launch, and not resumed by this one: launch once with "
        f"--fast-memory --fast-shm-dir {other} to resume it, or remove it)"
        for other in places
        for entry in _census(Path(other))
        # The name is derived from user, directory and node, so the same job has the same name in another place.
        if entry.path.name == arena.name and entry.directory == directory and entry.state is ArenaState.LEFT_BEHIND
        if ours
        and entry.claim.is_of(ours[0].claim.seen, ours[0].claim.inode)
        and entry.newest
        and (newest is None or entry.newest > newest)
    ]
    for text in found:
        logger.warning("%s", text)
    return found


def report_memory_of_others(arena: Path) -> None:
    """Warn of memory that another user has left for the same directory: this one cannot read it."""
    key = arena.name.rpartition("-")[2]
    for path in arena.parent.glob(f"fastckpt-*-{key}"):
        if path != arena and (owner := owner_of(path)) not in (None, os.getuid()):
            logger.warning(
                "%s is memory of user %d for this checkpoint directory: user %d cannot read it and resumes without it. "
                "Run as user %d to resume from it, or remove it",
                *(path, owner, os.getuid(), owner),
            )


def _census(directory: Path) -> list[ArenaEntry]:
    # Another launch's place may be gone, or not readable for this user: then it counts as empty.
    with suppress(OSError):
        return census(directory)
    return []
