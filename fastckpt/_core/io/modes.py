"""Modes of files on storage, by the umask of the job or its user's choice."""

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger("fastckpt")

# Of the whole process, as the umask is: a job has one user, and one choice.
_chosen: int | None = None


def choose(mode: int | None) -> None:
    """Have this process make files of exactly this mode, and directories that can be entered by who may read them.

    None follows the umask.
    """
    global _chosen
    _chosen = mode


def open_file(path: Path | str, flags: int, directory: int | None = None) -> int:
    """A descriptor of a file, which ``flags`` may have made, in the mode that it is to have.

    A relative path is below the open ``directory``, if there is one.
    """
    if _chosen is None:
        return os.open(path, flags, 0o666, dir_fd=directory)
    descriptor = os.open(path, flags, _chosen, dir_fd=directory)
    try:
        found = os.fstat(descriptor)
        is_own = found.st_uid == os.geteuid() and found.st_nlink <= 1  # another name may be one of a user's file
        if stat.S_IMODE(found.st_mode) != _chosen and is_own:
            # The mode in open(2) is reduced by the umask, which is the process's, not ours to change.
            os.fchmod(descriptor, _chosen)
    except OSError as error:
        _explain(path, error)
    return descriptor


def make_directory(path: Path, *, parents: bool = False) -> None:
    """Make a directory unless it is there, and with ``parents`` those above it that are missing."""
    try:
        new_directory(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    except FileNotFoundError:
        if not parents or path.parent == path:
            raise
        make_directory(path.parent, parents=True)
        make_directory(path)


def new_directory(path: Path | str, directory: int | None = None) -> None:
    """Make a directory in the mode that it is to have; a relative path is below the open ``directory``."""
    if _chosen is None:
        os.mkdir(path, dir_fd=directory)
        return
    os.mkdir(path, _entered(_chosen), dir_fd=directory)
    made = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        inherited = stat.S_IMODE(os.fstat(made).st_mode) & ~0o777  # that a group is inherited, for one
        os.fchmod(made, inherited | _entered(_chosen))
    except OSError as error:
        _explain(path, error)
    finally:
        os.close(made)


def _entered(mode: int) -> int:
    """The mode of a directory whose files have this one: who may read them may enter it."""
    # Read permission (4) moved to the bits of execute (1), which means entry for a directory.
    return mode | (mode & 0o444) >> 2


def _explain(path: Path | str, error: OSError) -> None:
    """A checkpoint in another mode is better than none."""
    logger.warning("%s keeps the mode that the file system gave it: %s", path, error)
