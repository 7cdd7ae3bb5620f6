"""Reads a file of a checkpoint from a store, and compares its digest on the way."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import xxhash

from fastckpt._core.byte_sizes import binary
from fastckpt._core.format.manifest import FileEntry
from fastckpt._core.storage.remote.objects import Objects
from fastckpt.errors import BadCheckpoint, PersistError

ATTEMPTS = 2
"""Number of reads of a file before its damage counts as the store's, not the network's."""


def download(objects: Objects, name: str, entry: FileEntry, into: FileIO | None) -> None:
    """Read an object, into a file if one is given.

    Raises:
        BadCheckpoint: It is damaged; the message has the found digest.
        PersistError: The file cannot take it.
        Exception: Any error of the store's client if the store does not answer.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _download_once(objects, name, entry, into)
            return
        except BadCheckpoint:
            if attempt == ATTEMPTS:
                raise


def _download_once(objects: Objects, name: str, entry: FileEntry, into: FileIO | None) -> None:
    found = xxhash.xxh3_128()
    if into:
        # A second attempt overwrites the first one's bytes.
        into.seek(0)
    for part in objects.parts(name, entry.size):
        found.update(part)
        if into:
            with room_for(entry, Path(os.fspath(into.name)).parent):
                _write(into, part)
    # Compared with the saved digest, not with one of the store.
    if found.hexdigest() != entry.digest:
        raise BadCheckpoint(
            f"{objects.url(name)} is damaged: its xxh3-128 is {found.hexdigest()}; {entry.digest} was saved"
        )


def _write(into: FileIO, part: bytes) -> None:
    # An unbuffered file may write less, which a full disk does before it raises.
    if into.write(part) != len(part):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def room_for(entry: FileEntry, place: Path) -> Iterator[None]:
    """Turn an error of this host's disk in a download into a PersistError: it is no fault of the store."""
    try:
        yield
    except OSError as error:
        free = next(shutil.disk_usage(each).free for each in (place, *place.parents) if each.exists())
        raise PersistError(
            f"cannot download {entry.name} to {place}: {error.strerror or error}. It has {binary(entry.size)}; "
            f"{binary(free)} is free there. Make room, or choose another TMPDIR."
        ) from error
