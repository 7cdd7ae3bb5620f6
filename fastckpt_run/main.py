"""The command fastckpt-run: torchrun, with checkpoints in shared memory."""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import click
import torch
import torch.distributed.run as torchrun
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    static_tcp_rendezvous,
)
from torch.distributed.launcher import api as launcher_api

from fastckpt._core.config import Settings
from fastckpt._core.saver.arena_location import copies_place
from fastckpt._core.version import VERSION
from fastckpt.errors import ConfigError, FastckptError, NotDurable
from fastckpt_run.agent import FastckptAgent
from fastckpt_run.dry_run.dry_run_text import show_dry_run
from fastckpt_run.events.summary import NeverWhole
from fastckpt_run.exit_codes import ADVICE, Ending, ExitStatus
from fastckpt_run.failures.folded import torch_lines
from fastckpt_run.node_check.node_check import NodeCheck, NodeCheckFailed
from fastckpt_run.options import read, require_positive, require_room_for_spares
from fastckpt_run.preload.preloader import Preloader
from fastckpt_run.rendezvous.handler import create_handler
from fastckpt_run.rendezvous.job_terms import JobTerms
from fastckpt_run.rendezvous.node_admission import NodeAdmission
from fastckpt_run.rendezvous.signing import secret_of
from fastckpt_run.rendezvous.static_rendezvous import StaticRendezvous
from fastckpt_run.shutdown import given_up
from fastckpt_run.torchrun_patches import (
    SIGNAL_HANDLER,
    BoundSubprocessHandler,
    FunctionWorkers,
    ScriptWorkers,
    is_this_host,
    registered,
)

_ENDINGS: dict[type[BaseException], Ending] = {
    click.UsageError: Ending.SETTING,
    click.ClickException: Ending.SCRIPT,  # there is none
    ConfigError: Ending.SETTING,
    NodeCheckFailed: Ending.NODE_CHECK,
    NotDurable: Ending.NOT_DURABLE,
    NeverWhole: Ending.NEVER_WHOLE,
    FastckptError: Ending.FAULT,
    RendezvousClosedError: Ending.ENDED_ELSEWHERE,
    RendezvousConnectionError: Ending.LACKS_NODES,
    RendezvousTimeoutError: Ending.LACKS_NODES,
    RendezvousError: Ending.FAULT,
    ChildFailedError: Ending.SCRIPT,
    SignalException: Ending.STOPPED,
    KeyboardInterrupt: Ending.STOPPED,
}
"""The cause of the agent's end by the error that it raised: the first kind that fits."""
# Errors that torch raises in these are about the user's arguments; others are faults, and need their traceback.
_READERS = (
    require_positive,
    torchrun.get_args_parser,
    torchrun.parse_min_max_nnodes,
    torchrun.config_from_args,
    create_handler,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line ``argv``; exits with torchrun's exit code and a message for people to read."""
    try:
        _main(argv)
    except SystemExit as end:
        _leave_threads(end.code)
        raise
    _leave_threads(0)


def _leave_threads(code: object) -> None:
    """End at once if something was given up: Python would wait for its threads, perhaps for a dead file system."""
    if given_up.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _main(argv: Sequence[str] | None) -> None:
    _log_readably()
    status = ExitStatus()
    try:
        run(sys.argv[1:] if argv is None else argv, status)
    except tuple(_ENDINGS) as error:
        ending = next(ending for kind, ending in _ENDINGS.items() if isinstance(error, kind))
        _exit(status.code(ending), _text(error, ending), status)
    # torch raises these for wrong arguments, too: only when they come from its readers are they the user's mistake.
    except (ValueError, RuntimeError, AssertionError) as error:
        if not _raised_in(error, *_READERS):
            raise
        _exit(status.code(Ending.REFUSED), _text(error, Ending.REFUSED), status)


def _text(error: BaseException, ending: Ending) -> str:
    """Return the text for the user on an error that ends the agent; torch's own of a rendezvous have no text."""
    if isinstance(error, SignalException | KeyboardInterrupt):  # torch handles signals once workers have started
        return f"fastckpt-run: stopped by {getattr(error, 'sigval', signal.SIGINT).name}"
    if isinstance(error, ChildFailedError):
        return str(error)
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    return f"fastckpt-run: error: {text or ending.when}"


@contextmanager
def substituted(
    settings: Settings, command: Sequence[str], node_check: NodeCheck, status: ExitStatus
) -> Iterator[None]:
    """Have torch.distributed.run launch our agent, with ``settings``, and our workers, while this lasts.

    ``command`` is the script and its arguments.
    """
    # torch offers no hook for its agent or its workers: names are replaced where torch looks them up, while it runs.
    preloader = Preloader(settings.preload)
    agent = partial(FastckptAgent, settings=settings, preloader=preloader, node_check=node_check, status=status)
    ours: list[tuple[ModuleType, str, Any]] = [
        (launcher_api, "LocalElasticAgent", agent),
        (multiprocessing, "SubprocessContext", partial(ScriptWorkers, grace=settings.stop_grace)),
        (multiprocessing, "MultiprocessContext", partial(FunctionWorkers, grace=settings.stop_grace)),
        (multiprocessing_api, "get_subprocess_handler", partial(BoundSubprocessHandler, preloader=preloader)),
        (static_tcp_rendezvous, "StaticTCPRendezvous", StaticRendezvous),
    ]
    torchs = [(module, name, getattr(module, name)) for module, name, _ in ours]
    try:
        for module, name, value in ours:
            setattr(module, name, value)
        release = torch.__version__.partition("+")[0]
        terms = JobTerms(VERSION, release, settings.replicas, script=Path(command[0]).name)
        create = partial(
            create_handler,
            secret=secret_of(settings),
            is_here=is_this_host,
            spares=settings.spares,
            exclude_after=settings.exclude_after,
            admission=NodeAdmission(terms, command[1:]),
        )
        with registered(create):
            yield
    finally:
        for module, name, value in torchs:
            setattr(module, name, value)


@record
def run(argv: Sequence[str], status: ExitStatus | None = None) -> None:
    """Run a job to its end, as torch.distributed.run.main does: raises ChildFailedError when workers fail.

    Args:
        argv: The command line.
        status: Learns how the agent ends.
    """
    line = read(argv)
    settings, arguments = line.settings, line.torchrun
    status = status or ExitStatus()
    status.fast = settings.exit_codes
    require_positive(arguments)
    require_room_for_spares(settings, arguments)
    copies_place(settings)  # raises ConfigError
    if line.is_dry_run:
        show_dry_run(line)
        return
    arguments.signals_to_handle = _without_ignored(arguments.signals_to_handle)
    if status.fast:
        _raise_at_signals(arguments.signals_to_handle)
    node_check = NodeCheck(settings)
    node_check.before_joining()  # first of all: some rendezvous end for all nodes when one of them leaves
    command = [arguments.training_script, *arguments.training_script_args]
    with substituted(settings, command, node_check, status):
        torchrun.run(arguments)  # type: ignore[no-untyped-call]


def _without_ignored(names: str) -> str:
    """The signals that torch is to handle, without SIGHUP if that is ignored, as by nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ",".join(name for name in names.split(",") if not (is_ignored and name.strip() == "SIGHUP"))


def _raise_at_signals(names: str) -> None:
    """Have the signals that torch handles once workers have started end the agent in the same way before that."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (getattr(signal, name.strip(), None) for name in names.split(",")):
        # One that is ignored, as by nohup, stays so until torch comes.
        if number and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, SIGNAL_HANDLER)


def _raised_in(error: BaseException, *functions: Callable[..., Any]) -> bool:
    """Return whether ``error`` came out of one of ``functions``."""
    codes = {getattr(function, "__code__", None) for function in functions}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _exit(code: int, message: str, status: ExitStatus) -> NoReturn:
    if status.fast and code in ADVICE:
        message += f"\nfastckpt-run: exit code {code}: {ADVICE[code]}"
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)


def _log_readably() -> None:
    """Our log lines to stderr; torch's that report the same of a worker to a file."""
    ours = logging.getLogger("fastckpt")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fastckpt-run: %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False
        logging.getLogger("fastckpt.report").setLevel(logging.INFO)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(torch_lines)
