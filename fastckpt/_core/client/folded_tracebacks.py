"""Tracebacks of ranks that lost the connection to another one: in a file, since the launcher names the failed rank.

Of a job of hundreds of ranks one fails, and all others raise the same error in their next collective. The traceback
that matters would be lost among theirs.
"""

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from fastckpt._core.config import RankInfo
from fastckpt._core.policy.hosts.lost_connections import is_lost_connection, traceback_file

_pids = set[int]()
"""Processes with such a hook on exceptions."""


def fold_lost_connections(place: RankInfo) -> None:
    """Write the traceback of a lost connection that ends this worker to a file, not to stderr, from here on."""
    file = traceback_file(place.error_file)
    if not place.agent or file is None or os.getpid() in _pids:
        return
    pid, before = os.getpid(), sys.excepthook
    _pids.add(pid)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid or not _fold(error.with_traceback(trace), file):
            before(kind, error, trace)

    sys.excepthook = show


def _fold(error: BaseException, file: Path) -> bool:
    """Write a traceback to its file; False if it has to be shown."""
    is_folded = is_lost_connection(traceback.format_exception_only(error)[-1]) and not _is_beside(file)
    if is_folded:
        try:
            file.write_text("".join(traceback.format_exception(error)))
        except OSError:
            return False
    return is_folded


def _is_beside(file: Path) -> bool:
    """Return whether stderr goes to the same folder: there it hides nothing, and is looked for."""
    try:
        return Path("/proc/self/fd/2").readlink().parent == file.parent.resolve()
    except OSError:
        return False
