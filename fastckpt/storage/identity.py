"""Tells a checkpoint directory from another one that later takes its name."""

import secrets
from pathlib import Path

from fastckpt.storage.durable import write_text

_NAME = ".fastckpt/identity"


def identity(directory: Path) -> str:
    """What this directory was marked with when it was first used; it is gone when the directory is.

    Returns "" for one that cannot be written to.
    """
    mark = directory / _NAME
    try:
        mark.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            write_text(mark, secrets.token_hex(16))
        except FileExistsError:
            pass
        return mark.read_text()
    except OSError:
        return ""
