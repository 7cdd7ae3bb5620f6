"""Lines and tracebacks of a failure that the launcher itself explains: in files beside the workers' logs."""

import logging
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path

from torch.distributed.elastic.multiprocessing import PContext

from fastckpt._core.policy.hosts.lost_connections import traceback_file
from fastckpt._core.policy.stack_groups import ranges

_FOLDED = re.compile(r"Sending process \d+ closing signal SIGKILL|failed \(exitcode: ")
"""Beginnings of torch's lines on workers that failed, or are killed for one that did."""


class TorchLines(logging.Filter):
    """Keeps torch's lines on the end of workers from the terminal, where our own line has the cause.

    Without a folder for logs they are shown. No line has a traceback: the worker has printed its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._file: Path | None = None

    def follow(self, workers: PContext | None) -> None:
        """Write them to ``launcher.log`` in the folder with the logs of these workers."""
        files = [traceback_file(file) for file in getattr(workers, "error_files", {}).values()]
        self._file = files[0].parents[2] / "launcher.log" if files and files[0] else None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is shown."""
        record.exc_info = None
        if self._file is None or not _FOLDED.match(record.getMessage()):
            return True
        try:
            with self._file.open("a") as file:
                file.write(f"{datetime.now().astimezone().isoformat()} {record.levelname} {record.getMessage()}\n")
        except OSError:
            return True
        return False


torch_lines = TorchLines()


def folded_traceback(workers: PContext | None, local_rank: int) -> Path | None:
    """The file with the traceback of a worker that lost a connection; None if there is none."""
    file = traceback_file(getattr(workers, "error_files", {}).get(local_rank, ""))
    return file if file is not None and file.is_file() else None


def folded(workers: PContext | None, ranks: Mapping[int, int], culprits: Collection[int], cause: str) -> str:
    """Text on the workers that lost the connection to one that failed; empty if there are none.

    Args:
        workers: Of this node.
        ranks: Their ranks, by local rank.
        culprits: Ranks that are named as failed. If there is no other cause, the traceback of the first is shown.
        cause: Failure of another node that came before; empty if none is known.
    """
    files = {rank: file for local, rank in ranks.items() if (file := folded_traceback(workers, local)) is not None}
    shown = [rank for rank in culprits if rank in files and not cause][:1]
    lines = [f"traceback of rank {rank}:\n{files[rank].read_text(errors='replace')}" for rank in shown]
    others = sorted(files.keys() - shown)
    if others:
        who, where = f"rank{'s' * (len(others) > 1)} {ranges(others)}", files[others[0]]
        place = f"{where.parents[1]}/*/{where.name}"
        lines.append(f"{who} lost the connection to a rank that failed; traceback in {place}")
    return "\n".join(lines)
