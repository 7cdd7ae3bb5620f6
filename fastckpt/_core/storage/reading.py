"""Reads files of checkpoints in pieces, in any place: for commands that look, and change nothing."""

import io
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import xxhash

from fastckpt._core.io.regular_file import open_regular
from fastckpt._core.storage.local.stored import answered, digest
from fastckpt._core.storage.remote.client_errors import ExplainedErrors
from fastckpt.errors import BadCheckpoint

if TYPE_CHECKING:
    from fastckpt._core.storage.remote.objects import Objects

AHEAD = 2**18
"""Bytes that are read at least from a store in one request."""
LONGEST_TEXT = 4096
"""Bytes of a small text that are read."""


def open_file(where: Path | str, size: int) -> BinaryIO:
    """Open a file of ``size`` bytes at a path or URL, to be read and sought in.

    Raises BadCheckpoint if it cannot be opened, PersistError if there is no answer; reading it raises OSError, too.
    """
    if isinstance(where, str):
        return cast(BinaryIO, _Remote(where, size))
    try:
        return answered(where, lambda: os.fdopen(open_regular(where, follow=True), "rb", buffering=0))
    except OSError as error:
        raise BadCheckpoint(f"{where} cannot be read: {error.strerror}") from error


def digest_of(where: Path | str, size: int, on_read: Callable[[int], None] | None = None) -> str:
    """The xxh3-128 digest of a file of ``size`` bytes at a path or URL, in 32 hexadecimal digits.

    ``on_read`` is called with the number of bytes of each part that was read, of some MiB.

    Raises:
        BadCheckpoint: It cannot be read to its end.
        PersistError: The store does not answer.
    """
    if isinstance(where, Path):
        return digest(where, on_read)
    found = xxhash.xxh3_128()
    with closing(_objects(where)) as objects, ExplainedErrors("read a file", where):
        for part in objects.parts("", size):
            found.update(part)
            if on_read:
                on_read(len(part))
    return found.hexdigest()


def read_text(location: Path | str, name: str) -> str | None:
    """A small text in a checkpoint directory, a path or URL; None if it is not there.

    Raises OSError, or PersistError if a store does not answer.
    """
    if isinstance(location, str):
        with closing(_objects(location)) as objects, ExplainedErrors(f"read {name}", location):
            found = objects.read(name, LONGEST_TEXT)
            return None if found is None else found.decode(errors="replace")
    try:
        with os.fdopen(open_regular(location / name), "rb") as file:
            return file.read(LONGEST_TEXT).decode(errors="replace")
    except FileNotFoundError:
        return None


def _objects(url: str) -> "Objects":
    from fastckpt._core.storage.remote.objects import Objects  # fsspec, which takes a while; most need none of it

    return Objects(url)


class _Remote(io.RawIOBase):
    """An object as a file. Each request brings the bytes that are asked for, or a little more if they are few."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size = url, size
        self._objects = _objects(url)
        self._position = 0
        self._start, self._ahead = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + (0, self._position, self._size)[whence]
        if position < 0:
            raise ValueError(f"{position} is before the beginning of {self._url}")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self._size - self._position))
        offset = self._position - self._start
        if not 0 <= offset <= len(self._ahead) - count:
            end = min(self._size, self._position + max(count, AHEAD))
            with ExplainedErrors("read a file", self._url):
                self._ahead = self._objects.read_range("", self._position, end) if count else b""
            self._start, offset = self._position, 0
        data = self._ahead[offset : offset + count]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._objects.close()
        super().close()
