"""Records the file operations of storage in the order in which they were made, with what they wrote."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os_close = os.close


@dataclass(frozen=True)
class Operation:
    """One file operation that succeeded.

    Attributes:
        kind: open, write, truncate, sync, rename, link, unlink, mkdir or rmdir.
        path: What it concerned, absolute; the old name of a rename or link.
        to: The new name.
        made: The inode that an open or mkdir made, if it did.
        handle: Which open file an open gave, and which one a write, truncate or sync concerned.
        offset: Where a write began; the size that a truncate gave.
        data: What was written.
    """

    kind: str
    path: str
    to: str = ""
    made: int = 0
    handle: int = 0
    offset: int = 0
    data: bytes = b""


class Killed(BaseException):
    """The process that is recorded is dead: it does nothing more."""


class Recorder:
    """The operations below a directory; whatever changes files must pass through the functions that it wraps.

    A test that replays them finds out if something did not: it ends with other files than there are.

    Args:
        root: The directory.
        kill_after: So many operations are made; then the process is as if it were dead.
    """

    def __init__(self, root: Path, kill_after: int | None = None) -> None:
        self._kill_after = kill_after
        self.operations: list[Operation] = []
        self._root = root
        self._handles: dict[int, tuple[int, str]] = {}
        self._opened = 0
        self._lock = threading.RLock()

    @contextmanager
    def recording(self) -> Iterator[None]:
        wrapped = {
            "open": self._open, "close": self._close, "write": self._write, "pwrite": self._pwrite,
            "ftruncate": self._ftruncate, "truncate": self._refuse, "pwritev": self._refuse, "writev": self._refuse,
            "posix_fallocate": self._refuse, "copy_file_range": self._refuse, "sendfile": self._refuse,
            "fsync": self._sync, "fdatasync": self._sync, "symlink": self._refuse, "replace": self._name("rename"),
            "rename": self._name("rename"), "link": self._name("link"), "unlink": self._name("unlink"),
            "remove": self._name("unlink"), "mkdir": self._name("mkdir"), "rmdir": self._name("rmdir"),
        }  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            for name, wrapper in wrapped.items():
                patch.setattr(os, name, self._wrap(getattr(os, name), wrapper))
            yield

    def _wrap(self, real: Callable, wrapper: Callable) -> Callable:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                if real is not os_close and len(self.operations) == self._kill_after:
                    raise Killed
                return wrapper(real, *arguments, **named)

        return call

    def _note(self, kind: str, path: str, **more: Any) -> None:
        if Path(path).is_relative_to(self._root):
            self.operations.append(Operation(kind, path, **more))

    def _path(self, path: Any, dir_fd: int | None = None) -> str:
        if isinstance(path, int):
            return self._handles[path][1]
        within = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
        return os.path.abspath(os.path.join(within, os.fsdecode(path)))

    def _open(self, real: Callable, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_PATH:
            return real(path, flags, mode, dir_fd=dir_fd)  # it leads to what is opened next, and changes nothing
        where = self._path(path, dir_fd)
        new = bool(flags & os.O_CREAT) and not os.path.lexists(where)
        fd = real(path, flags, mode, dir_fd=dir_fd)
        self._opened += 1
        self._handles[fd] = (self._opened, where)
        self._note("open", where, handle=self._opened, made=os.fstat(fd).st_ino if new else 0)
        assert not flags & os.O_TRUNC, f"{where} is opened with O_TRUNC"
        return fd

    def _close(self, real: Callable, fd: int) -> None:
        self._handles.pop(fd, None)
        real(fd)

    def _write(self, real: Callable, fd: int, data: Any) -> int:
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        count = real(fd, data)
        self._note_write(fd, offset, data, count)
        return count

    def _pwrite(self, real: Callable, fd: int, data: Any, offset: int) -> int:
        count = real(fd, data, offset)
        self._note_write(fd, offset, data, count)
        return count

    def _note_write(self, fd: int, offset: int, data: Any, count: int) -> None:
        if fd in self._handles:
            handle, path = self._handles[fd]
            self._note("write", path, handle=handle, offset=offset, data=bytes(data[:count]))

    def _ftruncate(self, real: Callable, fd: int, size: int) -> None:
        real(fd, size)
        if fd in self._handles:
            handle, path = self._handles[fd]
            self._note("truncate", path, handle=handle, offset=size)

    def _sync(self, real: Callable, fd: int) -> None:
        real(fd)
        handle, path = self._handles[fd]
        self._note("sync", path, handle=handle)

    def _name(self, kind: str) -> Callable:
        def change(real: Callable, path: Any, *more: Any, **named: Any) -> None:
            where = self._path(path, named.get("dir_fd", named.get("src_dir_fd")))
            real(path, *more, **named)
            to = self._path(more[0], named.get("dst_dir_fd")) if kind in ("rename", "link") else ""
            self._note(kind, where, to=to, made=os.stat(where).st_ino if kind == "mkdir" else 0)

        return change

    @staticmethod
    def _refuse(real: Callable, *arguments: Any, **named: Any) -> None:
        raise AssertionError(f"the recorder does not know {real.__name__}{arguments}")
