"""The cause of a worker's failure: its exception, the frame that raised it, and the file that has its stderr."""

import re
import sysconfig
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import fastckpt
from fastckpt._core.policy.hosts.lost_connections import is_lost_connection
from fastckpt_run.failures.deaths import Death, DeathWatch
from fastckpt_run.failures.folded import folded_traceback
from fastckpt_run.failures.tracebacks import last_traceback, tail_of
from fastckpt_run.torchrun_patches import is_shown

_RANK = re.compile(r"^\[rank\d{1,9}\]: ?", re.MULTILINE)
"""The prefix of each line of a traceback that torch writes once there is a process group."""
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<function>.+)')
_PYTHON = f"{sysconfig.get_path('stdlib')}/"
_TOOLS = (*(f"{Path(str(module.__file__)).parent}/" for module in (torch, fastckpt)), "<frozen ")
_LONGEST = 200
"""Characters of an exception that are shown."""
CAUSE_PATIENCE, CAUSE_PATIENCE_OF_SEVERAL = 4.0, 1.0
"""Seconds for which a failure that is only a lost connection waits for its cause, on one node and on several: there it
may be another's."""


@dataclass(frozen=True)
class Cause:
    """The cause of a failure as far as it is known; each field is empty if it is not.

    Attributes:
        exception: Type and message, such as ``ValueError: bad batch``.
        frame: The innermost frame that is not of Python's library, torch or fastckpt, such as ``step (train.py:57)``;
            if there is none, the innermost.
        log: The path of the file to which the worker's stderr went.
    """

    exception: str = ""
    frame: str = ""
    log: str = ""

    @property
    def is_lost_connection(self) -> bool:
        """True if it follows from the failure of another rank."""
        return is_lost_connection(self.exception)


def with_cause(
    deaths: list[Death],
    watch: DeathWatch,
    cause: Callable[[Death], Cause],
    is_known: Callable[[], bool],
    patience: float,
) -> list[Death]:
    """The deaths, and those that follow within some seconds, as long as all have only lost a connection.

    Args:
        deaths: Deaths that were noticed.
        watch: Watch of the other nodes.
        cause: Finds out why a worker died.
        is_known: Returns whether another node has failed: then nothing is waited for.
        patience: Seconds for which a better cause is waited for.
    """
    found, end = list(deaths), time.monotonic() + patience
    while found and watch.is_watching and time.monotonic() < end and not is_known():
        if not all((death.exitcode or 0) > 0 and cause(death).is_lost_connection for death in found):
            break
        found += [death for death in watch.wait(0.05) if death.exitcode]
    return found


def cause_of_death(death: Death, reported: str, workers: PContext | None) -> Cause:
    """Find out why a worker died, before torch has looked; as `cause_of`."""
    log = _log_of(death, workers)
    return _read(reported or _written(death, workers), log)


def cause_of(failure: ProcessFailure, reported: str, workers: PContext | None) -> Cause:
    """Find out why a worker failed.

    Args:
        failure: As torch found it.
        reported: The traceback that a preloaded worker has left; empty if there is none.
        workers: Whose streams may have been caught.
    """
    log = _log_of(failure, workers)
    if failure.exitcode < 0:  # a traceback before a signal would be another matter
        return Cause(log=log)
    return _read(last_words(failure, reported, workers), log)


def last_words(failure: ProcessFailure, reported: str, workers: PContext | None) -> str:
    """The end of a worker's output: a traceback, or the end of its stderr; empty if neither is known.

    Args:
        failure: As torch found it; its message is that of the error file, if torch's ``record`` wrote one.
        reported: The traceback that a preloaded worker has left; empty if there is none.
        workers: Whose streams may have been caught.
    """
    extra = failure.message.get("extraInfo") if isinstance(failure.message, dict) else None
    recorded = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    return reported or recorded or _written(failure, workers)


def _written(failure: ProcessFailure | Death, workers: PContext | None) -> str:
    """The end of a worker's output in files: its stderr, if it was caught, or a traceback that was folded."""
    return tail_of(_log_of(failure, workers)) or tail_of(str(folded_traceback(workers, failure.local_rank) or ""))


def _log_of(failure: ProcessFailure | Death, workers: PContext | None) -> str:
    """The path of the file to which a worker's stderr went; empty if it was not caught."""
    return str(getattr(workers, "stderrs", {}).get(failure.local_rank) or "")


def _read(words: str, log: str) -> Cause:
    """The exception and its frame in the last traceback of a worker's output."""
    # The last traceback: an exception raised while another was handled comes after it.
    lines = last_traceback(_RANK.sub("", words))[1:]
    frames = [found for line in lines if (found := _FRAME.match(line))]
    exception = next((line for line in lines if line and not line[0].isspace()), "")
    own = [found for found in frames if not _raises_for_others(found["file"])]
    last = (own or frames)[-1] if frames and exception else None
    frame = f"{last['function']} ({PurePath(last['file']).name}:{last['line']})" if last else ""
    return Cause(_plain(exception), _plain(frame), log)


def _raises_for_others(file: str) -> bool:
    """Return whether a file is of torch, fastckpt or Python's library, which raise because of a script's arguments."""
    return file.startswith(_TOOLS) or (file.startswith(_PYTHON) and "-packages/" not in file)


def _plain(text: str) -> str:
    """A line without control characters for a terminal, of reasonable length."""
    text = "".join(c if c.isprintable() else " " for c in text).strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def explain(failure: ProcessFailure, workers: PContext, hung: Container[int], lost: str) -> None:
    """Word ``failure.message``, which ChildFailedError shows as the traceback; the error file stays as it is.

    ``hung`` are the pids of workers that were killed for that; ``lost`` is why all were stopped, if none had failed.
    """
    if failure.exitcode < 0 and not isinstance(failure.message, dict):
        # A worker that was killed reports SIGKILL; only the agent knows why it was sent.
        if failure.pid in hung:
            failure.message += ", from the agent, because it hung"
        elif failure.local_rank in getattr(workers, "stopped", ()):
            failure.message += f", from the agent, because {lost or 'another worker had failed'}"
    elif file := folded_traceback(workers, failure.local_rank):
        failure.message = f"{_summary(failure)}its traceback is in {file}"
    elif is_shown(workers, failure.local_rank):
        failure.message = f"{_summary(failure)}see above for what the worker printed"
    elif not isinstance(failure.message, dict):
        failure.message = _last_traceback(Path(workers.stderrs[failure.local_rank]))


def _summary(failure: ProcessFailure) -> str:
    return f"{failure.message.get('message')}; " if isinstance(failure.message, dict) else ""


def _last_traceback(log: Path) -> str:
    """The end of a redirected stderr, from its last traceback on."""
    if not log.is_file():
        return "not known: its stderr was not shown"
    return "\n  ".join([f"see {log}", *last_traceback(tail_of(str(log)))]).rstrip()
