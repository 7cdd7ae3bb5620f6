"""The file that an export writes: its bytes go to storage while it grows, and are reported as they do."""

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fastckpt._core.format.safetensors import SafetensorsPlanner, Tensors
from fastckpt._core.io.unbuffered import WriteBehind
from fastckpt.errors import ConfigError, NotLoadable

BLOCK = 16 * 2**20
"""Bytes that are written at once, at most: between them signals are handled, and progress is reported."""


class ExportedFile(AbstractContextManager["ExportedFile"]):
    """A new file, open to be written from its beginning to its end; raises OSError if there is one already.

    Args:
        path: Its place.
        on_written: Is called with each number of bytes, once some MiB have gathered.
    """

    def __init__(self, path: Path, on_written: Callable[[int], None]) -> None:
        self._file = path.open("xb")
        self._behind = WriteBehind(self._file.fileno())
        self._on_written = on_written
        self._offset, self._reported = 0, 0

    def write(self, data: Any) -> int:
        """Write all of some bytes."""
        with memoryview(data).cast("B") as view:
            for start in range(0, len(view), BLOCK):
                with view[start : start + BLOCK] as block:
                    self._offset += self._file.write(block)
                if self._offset - self._reported >= BLOCK:
                    self._report()
            return len(view)

    def flush(self) -> None:
        """Hand buffered bytes to the system."""
        self._file.flush()

    def sync(self) -> None:
        """Make all bytes durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._behind.finish()
        self._on_written(self._offset - self._reported)
        self._reported = self._offset

    def _report(self) -> None:
        # Without this, the page cache would take all, and reports be far ahead of the disk: the wait would
        # come in `sync`, when nothing was left to report.
        self._behind.wrote(self._reported, self._offset - self._reported)
        self._on_written(self._offset - self._reported)
        self._reported = self._offset

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def write_torch(state: Any, file: ExportedFile) -> None:
    """Write a state with torch.save."""
    try:
        torch.save(state, file)  # type: ignore[arg-type]  # as documented, it needs write and flush
    except RuntimeError as error:
        # Its writer fails once more when it is closed after a write has failed, or a signal has ended it.
        cause = error.__context__
        raise (error if cause is None or isinstance(cause, RuntimeError) else cause) from None


def write_safetensors(tensors: Tensors, file: ExportedFile) -> None:
    """Write tensors as the library of safetensors would; raises ConfigError for values that the format cannot hold.

    The library itself writes all in one call, which no signal ends, to a file of another name.
    """
    try:
        plan = SafetensorsPlanner().plan(tensors)
    except NotLoadable as error:
        raise ConfigError(f"{error}. Export it with --format torch.") from error
    for _, header in plan.skeleton.segments:
        file.write(header)
    for storage in plan.storages:
        if size := storage.nbytes():
            file.write((ctypes.c_char * size).from_address(storage.data_ptr()))
