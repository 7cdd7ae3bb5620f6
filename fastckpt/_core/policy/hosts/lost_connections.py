"""Exceptions of a rank that follow from the end of another rank, and the file that has their tracebacks."""

import re
from pathlib import Path

_EXCEPTIONS = re.compile(
    r"(RuntimeError|torch\.distributed\.\w+): .*"
    "(Connection (closed|reset) by peer|Broken pipe|remote process exited|ncclRemoteError|failed to recv, got 0 bytes)"
)
"""Errors of gloo, NCCL and TCPStore."""


def is_lost_connection(exception: str) -> bool:
    """Return whether an exception, as the last line of its traceback has it, follows from the end of another rank."""
    return _EXCEPTIONS.match(exception) is not None


def traceback_file(error_file: str) -> Path | None:
    """The file for a worker's traceback, beside torch's error file; None if the worker has no folder of its own."""
    path = Path(error_file or "/dev/null")
    return None if path == Path("/dev/null") else path.with_name("traceback.log")
