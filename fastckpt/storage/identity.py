"""Tells a checkpoint directory from another one that later takes its name."""

import contextlib
import secrets
from pathlib import Path

from fastckpt.storage.durable import write_text

_NAME = ".fastckpt/identity"


def identity(directory: Path) -> str:
    """What this directory was marked with when it was first used; it is gone when the directory is.

    Returns "" for one that has no mark and cannot be written to. Raises OSError if its mark cannot be read:
    memory of a directory that does not answer for a moment must not pass for that of another one.
    """
    path = directory / _NAME
    with contextlib.suppress(OSError):  # it has one, or cannot be written to
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_text(path, secrets.token_hex(16))
    return mark(directory)


def mark(directory: Path) -> str:
    """The mark that is in a directory, empty for none; raises OSError if it cannot be read."""
    try:
        return (directory / _NAME).read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""
