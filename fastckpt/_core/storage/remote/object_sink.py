"""Sinks for the bytes of one large object while it is made."""

from functools import partial
from typing import Any, Protocol

from fsspec.spec import AbstractBufferedFile

from fastckpt._core.storage.remote.filesystem import RemoteFilesystem


class ObjectSink(Protocol):
    """Takes the bytes of one object, which nobody sees before they are all there."""

    def write(self, part: bytes) -> Any:
        """Take the next bytes."""

    def commit(self) -> Any:
        """Make the object."""

    def discard(self) -> Any:
        """Leave nothing."""


class StreamSink:
    """A file of fsspec that is written in one go."""

    def __init__(self, client: RemoteFilesystem, path: str, block_size: int) -> None:
        self._told = partial(client.told, f"write {path}")
        with self._told():
            self._file = client.fs.open(path, "wb", block_size=block_size)

    def write(self, part: bytes) -> None:
        """Send the next bytes."""
        with self._told():
            self._file.write(part)

    def commit(self) -> None:
        """Make the object."""
        with self._told():
            self._file.close()

    def discard(self) -> None:
        """Leave nothing, where the file system can do that; else the written bytes, without a manifest."""
        if isinstance(self._file, AbstractBufferedFile):
            self._file.discard()
            self._file.closed = True  # else its destructor would make the object after all
        else:
            self._file.close()
