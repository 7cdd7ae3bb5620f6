"""Reads of files on storage, by whichever process: opened to be read alone, or read from, as the kernel reports it."""

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

DATA = {".distcp", ".metadata", ".pt"}
"""Ends of names of a checkpoint's files; its manifest, and records of the directory, are a few KB."""
_ACCESS, _CLOSE_NOWRITE, _IS_DIRECTORY = 0x1, 0x10, 0x40000000
_HEADER = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class StorageReads:
    """Counts reads of the files that are in a directory, at any depth; see inotify(7).

    Directories that are made later are not watched: files in them are new.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._folders = {self._watch(Path(folder)): Path(folder) for folder, _, _ in os.walk(directory)}

    def __enter__(self) -> "StorageReads":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def paths(self) -> set[Path]:
        """The files that were read since the last call."""
        found = set[Path]()
        while True:
            try:
                data = os.read(self._fd, 1 << 20)
            except BlockingIOError:
                return found
            found.update(self._read(data))

    def _watch(self, folder: Path) -> int:
        number: int = _libc.inotify_add_watch(self._fd, os.fsencode(folder), _ACCESS | _CLOSE_NOWRITE)
        if number < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(folder))
        return number

    def _read(self, data: bytes) -> Iterator[Path]:
        at = 0
        while at < len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size + length
            name = os.fsdecode(data[at - length : at].rstrip(b"\0"))
            assert watch in self._folders, "reads were more than the kernel's queue holds"
            if name and not mask & _IS_DIRECTORY:
                yield self._folders[watch] / name
