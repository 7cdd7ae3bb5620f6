"""The end of a process's log, and the last traceback in it."""

import os
from pathlib import Path

_TAIL = 1 << 16
"""Bytes at the end of a log that are read."""
_TRACEBACK = "Traceback (most recent call last):"


def tail_of(log: str) -> str:
    """The end of a file; empty if there is none."""
    try:
        with Path(log).open("rb") as file:
            # A worker may have written gigabytes: the agent reads the end alone.
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read().decode(errors="replace")
    except OSError:  # there is none, it is a directory, or it was removed
        return ""


def last_traceback(text: str) -> list[str]:
    """The lines of the last traceback, and all that follows; none if there is no traceback."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    return lines[starts[-1] :] if starts else []
