"""Reads a file of a checkpoint from a store, and checks on the way that it is what was saved."""

import errno
from io import FileIO

import xxhash

from fastckpt.errors import BadCheckpoint
from fastckpt.format.manifest import FileEntry
from fastckpt.storage.objects import Objects

ATTEMPTS = 2
"""How often a file is read before its damage is believed to be the store's, not the network's."""


def download(objects: Objects, name: str, entry: FileEntry, into: FileIO | None) -> None:
    """Read an object, into a file if one is given.

    Raises:
        BadCheckpoint: It is not what was saved; says what was found.
        OSError: The file cannot take it.
        Exception: What the store's client raises if the store does not answer.
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
        into.seek(0)
    for part in objects.parts(name, entry.size):
        found.update(part)
        if into and into.write(part) != len(part):
            raise OSError(errno.ENOSPC, f"{into.name} cannot take {entry.size} bytes")
    if found.hexdigest() != entry.digest:
        raise BadCheckpoint(
            f"{objects.url(name)} is damaged: its xxh3-128 is {found.hexdigest()}; {entry.digest} was saved"
        )
