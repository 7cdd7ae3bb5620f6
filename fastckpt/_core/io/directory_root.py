"""File operations below a directory that follow no link: its contents cannot lead a writer elsewhere."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fastckpt._core.io.durable import sync_names, write_all
from fastckpt._core.io.modes import new_directory, open_file
from fastckpt._core.io.regular_file import demand_regular

WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of file systems that have no hard links, or none between two places."""
_NO_LINKS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Entry(NamedTuple):
    """A name in a directory.

    Attributes:
        name: The last part of its path.
        is_directory: True if it is that of a directory.
        leads_to_directory: True if it is that of a directory, or of a link to one.
        inode: That of the directory, file or link.
    """

    name: str
    is_directory: bool
    leads_to_directory: bool
    inode: int


class DirectoryRoot:
    """A directory that may hold entries of others.

    Paths are absolute, and below the directory. Each is walked from its descriptor, a name at a time, as openat2(2)
    does with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS: a link on the way is an error, also one that is put there later.
    The directory's own path is the user's word, and may have links. Errors are OSError, with the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of a regular file, which ``flags`` may have made."""
        with self._at(path) as (directory, name):
            descriptor = open_file(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, directory)
            return demand_regular(descriptor, path)

    def write_text(self, path: Path, text: str) -> None:
        """Write a new file; its bytes are durable, its name is not. Nothing is left of it on OSError."""
        # O_EXCL: the name is private to this writer, so a file that has it already is another's.
        descriptor = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                write_all(descriptor, text.encode("utf-8", "surrogateescape"))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)  # where some network file systems and FUSE servers report that a write has failed
        except OSError as error:
            error.filename = error.filename or str(path)
            self.unlink(path)
            raise

    def make_directory(self, path: Path, *, parents: bool = False, durable: bool = False) -> None:
        """Make a directory unless it is there, and with ``parents`` those between the root and it.

        With ``durable`` their names outlive a crash: level by level, so that none is left whose parent is lost.
        """
        if parents and path == self.path:
            return
        if parents:
            self.make_directory(path.parent, parents=True, durable=durable)
        with self._at(path) as (directory, name):
            try:
                new_directory(name, directory)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(name, dir_fd=directory).st_mode):
                    _refuse_link(name, directory)
                    raise
                return
        if durable:
            self.sync(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, as rename(2) does; the new name is not durable."""
        with self._at(source) as (directory, name), self._at(target) as (new_directory, new_name):
            os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=new_directory)

    def move(self, source: Path, target: Path) -> None:
        """Rename, and make the new name durable; the old one may be there still, or again, after a crash."""
        # Atomic within a file system: at each instant one of both names exists.
        self.rename(source, target)
        self.sync(target.parent)

    def link(self, source: Path, target: Path, *, into: "DirectoryRoot | None" = None) -> None:
        """Give a file one more name, below another root if there is one; the name is not durable."""
        with self._at(source) as (directory, name), (into or self)._at(target) as (new_directory, new_name):
            os.link(name, new_name, src_dir_fd=directory, dst_dir_fd=new_directory, follow_symlinks=False)

    def copy_link(self, source: Path, target: Path) -> bool:
        """Make a link as another is; False if that one is none."""
        with self._at(source) as (directory, name), self._at(target) as (new_directory, new_name):
            if not stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode):
                return False
            os.symlink(os.readlink(name, dir_fd=directory), new_name, dir_fd=new_directory)
            return True

    def unlink(self, path: Path) -> None:
        """Remove a file or link, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._at(path) as (directory, name):
            os.unlink(name, dir_fd=directory)

    def remove(self, path: Path) -> None:
        """Remove a file, a link or a tree, as far as that is possible."""
        # A tree may be deeper than Python's stack; it stays.
        with contextlib.suppress(OSError, RecursionError), self._at(path) as (directory, name):
            if stat.S_ISDIR(os.lstat(name, dir_fd=directory).st_mode):
                # A tree that cannot be removed has a name that does not count: the next sweep tries again.
                shutil.rmtree(name, ignore_errors=True, dir_fd=directory)
            else:
                os.unlink(name, dir_fd=directory)

    def remove_empty(self, path: Path) -> bool:
        """Remove a directory if it is one, and empty; whether it was."""
        with contextlib.suppress(OSError), self._at(path) as (directory, name):
            os.rmdir(name, dir_fd=directory)
            return True
        return False

    def sync(self, path: Path) -> None:
        """Make the names in a directory durable."""
        with self._at(path) as (directory, name):
            opened = _enter(name, directory, os.O_RDONLY)
            try:
                sync_names(opened)
            finally:
                os.close(opened)

    def sync_tree(self, path: Path) -> None:
        """Make all names in a directory durable, and in those below it."""
        # Bottom-up: a directory's name becomes durable after its contents.
        with self._at(path) as (directory, name):
            for _, _, _, each in os.fwalk(name, topdown=False, onerror=_raise, dir_fd=directory):
                sync_names(each)

    def lstat(self, path: Path) -> os.stat_result | None:
        """Return the status of a name, of the link itself if it is one; None if there is nothing."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._at(path) as (directory, name):
            return os.lstat(name, dir_fd=directory)
        return None

    def exists(self, path: Path) -> bool:
        """Return whether anything has this name, also a broken link."""
        return self.lstat(path) is not None

    def is_directory(self, path: Path) -> bool:
        """Return whether a name is that of a directory; False for a link to one."""
        found = self.lstat(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def is_file(self, path: Path) -> bool:
        """Return whether a name is that of a regular file; False for a link to one."""
        found = self.lstat(path)
        return found is not None and stat.S_ISREG(found.st_mode)

    def latest_change(self, path: Path) -> float:
        """Return the time, in seconds, of the last change to a file or directory, or to anything below it."""
        with self._at(path) as (directory, name):
            walk = os.fwalk(name, onerror=_raise, dir_fd=directory)
            below = (os.lstat(each, dir_fd=at).st_mtime for _, _, files, at in walk for each in (*files, "."))
            return max(below, default=os.lstat(name, dir_fd=directory).st_mtime)

    def entries(self, path: Path) -> list[Entry]:
        """The names in a directory, sorted; raises FileNotFoundError if there is none."""
        with self._at(path) as (directory, name):
            listed = _enter(name, directory, os.O_RDONLY)
            try:
                with os.scandir(listed) as entries:
                    return sorted(map(_entry, entries))
            finally:
                os.close(listed)

    @contextlib.contextmanager
    def _at(self, path: Path) -> Iterator[tuple[int, str]]:
        """The directory that has a path, open, and the last name of the path; errors within it get the path."""
        *above, name = path.relative_to(self.path).parts or (".",)
        if ".." in (*above, name):
            raise OSError(errno.EXDEV, f"it is not within {self.path}", str(path))
        with contextlib.ExitStack() as on_exit:
            try:
                # A handle, which needs no right to list: some users may only enter the directories above.
                directory = _opened(lambda: os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), on_exit)
                for part in above:
                    directory = _opened(lambda: _enter(part, directory), on_exit)  # noqa: B023 (called at once)
                yield directory, name
            except OSError as error:
                if str(error.filename or "").startswith("/"):
                    raise
                # It has the names that were walked, not their paths.
                raise OSError(error.errno, error.strerror, str(path)) from error


def _opened(open_it: Callable[[], int], on_exit: contextlib.ExitStack) -> int:
    descriptor = open_it()
    on_exit.callback(os.close, descriptor)
    return descriptor


def _enter(name: str, directory: int, flags: int = os.O_PATH) -> int:
    try:
        return os.open(name, flags | _NO_LINKS, dir_fd=directory)
    except NotADirectoryError:
        _refuse_link(name, directory)
        raise


def _refuse_link(name: str, directory: int) -> None:
    if stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode):
        raise OSError(errno.ELOOP, f"{name} is a link, which is not followed here", name)


def _entry(found: os.DirEntry[str]) -> Entry:
    # The listing has the kinds of entries: of 100,000 files beside checkpoints none is opened.
    is_directory = found.is_dir(follow_symlinks=False)
    try:
        leads_to_directory = is_directory or found.is_dir()
    except OSError:  # of a link, or where the listing has no kinds: the open will find out
        leads_to_directory = True
    return Entry(found.name, is_directory, leads_to_directory, found.inode())


def _raise(error: OSError) -> None:
    raise error
