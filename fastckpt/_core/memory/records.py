"""Small JSON files in shared memory: written whole or not at all, and read without trust."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fastckpt._core.io.durable import write_all
from fastckpt._core.io.read_errors import Phase, ReadVerdict, remedy, verdict
from fastckpt._core.io.regular_file import LARGEST, read_small
from fastckpt._core.policy.resume import MEMORY

Read = TypeVar("Read")

ATTEMPTS = 20
PAUSE = 0.05
"""Seconds between two attempts to read a file, for want of descriptors or memory."""


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record so that it is there whole or not at all, whenever the writer dies.

    Raises:
        OSError: It cannot be written, or has more than LARGEST bytes.
    """
    write_text(path, json.dumps(record))


def write_text(path: Path, text: str) -> None:
    """Write a small file, as `write_record` does."""
    data = text.encode()
    if len(data) > LARGEST:
        raise OSError(f"the record {path} would have {len(data)} bytes; it may have {LARGEST}")
    temporary = path.with_name(f".tmp{path.name}")
    remove_any(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)
    temporary.rename(path)


def read_record(path: Path) -> dict[str, Any]:
    """The record at ``path``; {} for anything else: nothing, a link, a pipe, a giant, no JSON object.

    Raises OSError if that is not known now, for lack of descriptors or memory.
    """
    return parse_record(if_there(lambda: read_small(path), b""))


def read_records(directory: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """The records of these names in a directory, read in this order, each as `read_record` does."""
    return [read_record(directory / name) for name in names]


def parse_record(data: bytes) -> dict[str, Any]:
    """The JSON object that ``data`` is; {} if it is none."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def make_folders(root: Path, folder: Path) -> None:
    """Make a folder below a root, and those between; raises FileNotFoundError if the root is not there.

    An arena that was removed is its owner's to make: it would lack its mode and its owner else.
    """
    for part in folder.relative_to(root).parts:
        root /= part
        root.mkdir(mode=0o700, exist_ok=True)


def remove_any(path: Path) -> None:
    """Remove a file, if there is one, or a directory: that is not ours, but in the way."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)


def names_in(directory: Path) -> list[str]:
    """Names in a directory; [] for one that cannot be listed. Raises OSError as `read_record`."""
    return if_there(lambda: sorted(path.name for path in directory.iterdir()), [])


def if_there(read: Callable[[], Read], otherwise: Read) -> Read:
    """Return the result of ``read``; ``otherwise`` if the error shows that the file is not there, or not ours.

    After an error that proves neither, such as want of descriptors, it tries again for a second: the answer that
    nothing is there would be the end of a checkpoint. Then the error is raised, with its remedy.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return read()
        except OSError as error:
            if verdict(error, Phase.READING, MEMORY) is not ReadVerdict.NO_ANSWER:
                break
            if attempt == ATTEMPTS:
                raise OSError(error.errno, f"{error.strerror}. {remedy(error)}", error.filename) from error
        time.sleep(PAUSE)
    return otherwise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in errors of calls on its descriptor, which know no path."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
