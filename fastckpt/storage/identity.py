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
    mark = directory / _NAME
    with contextlib.suppress(OSError):  # it has one, or cannot be written to
        mark.parent.mkdir(mode=0o700, exist_ok=True)
        write_text(mark, secrets.token_hex(16))
    try:
        return mark.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""
