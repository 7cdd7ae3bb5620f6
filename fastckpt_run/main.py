"""The command fastckpt-run: torchrun, with checkpoints in shared memory."""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import click
import torch.distributed.run as torchrun
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher_api

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError, FastckptError, NotDurable
from fastckpt_run.agent import FastckptAgent
from fastckpt_run.dry_run.dry_run_text import show_dry_run
from fastckpt_run.node_check.node_check import BAD_NODE, NodeCheck, NodeCheckFailed
from fastckpt_run.options import read
from fastckpt_run.preload.preloader import Preloader
from fastckpt_run.rendezvous.handler import create_handler
from fastckpt_run.rendezvous.signing import secret_of
from fastckpt_run.shutdown import given_up
from fastckpt_run.torchrun_patches import (
    BoundSubprocessHandler,
    FunctionWorkers,
    ScriptWorkers,
    is_this_host,
    registered,
)

# What torch raises in these is about the user's arguments; from elsewhere it is a fault, whose traceback counts.
_READERS = (torchrun.get_args_parser, torchrun.parse_min_max_nnodes, torchrun.config_from_args, create_handler)


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
    try:
        run(sys.argv[1:] if argv is None else argv)
    except click.ClickException as error:
        _exit(error.exit_code, f"fastckpt-run: error: {error.format_message()}")
    except NotDurable as error:
        # A code of its own (75): launched again, the job resumes from memory and persists.
        _exit(os.EX_TEMPFAIL, f"fastckpt-run: error: {error}")
    except (FastckptError, RendezvousError) as error:
        codes = {ConfigError: 2, NodeCheckFailed: BAD_NODE}
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), 1)
        _exit(code, f"fastckpt-run: error: {error}")
    except ChildFailedError as error:
        _exit(1, str(error))
    except (SignalException, KeyboardInterrupt) as error:  # torch handles signals once workers have started
        _exit(1, f"fastckpt-run: stopped by {getattr(error, 'sigval', signal.SIGINT).name}")
    # torch raises these for wrong arguments, too: only when they come from its readers are they the user's mistake.
    except (ValueError, RuntimeError, AssertionError) as error:
        if not _raised_in(error, *_READERS):
            raise
        _exit(1, f"fastckpt-run: error: {error}")


@contextmanager
def substituted(settings: Settings, node_check: NodeCheck | None = None) -> Iterator[None]:
    """While this lasts, torch.distributed.run launches our agent, with ``settings``, and our workers."""
    # torch offers no hook for its agent or its workers: names are replaced where torch looks them up, while it runs.
    preloader = Preloader(settings.preload)
    agent = partial(FastckptAgent, settings=settings, preloader=preloader, node_check=node_check)
    ours: list[tuple[ModuleType, str, Any]] = [
        (launcher_api, "LocalElasticAgent", agent),
        (multiprocessing, "SubprocessContext", partial(ScriptWorkers, grace=settings.stop_grace)),
        (multiprocessing, "MultiprocessContext", partial(FunctionWorkers, grace=settings.stop_grace)),
        (multiprocessing_api, "get_subprocess_handler", partial(BoundSubprocessHandler, preloader=preloader)),
    ]
    torchs = [(module, name, getattr(module, name)) for module, name, _ in ours]
    try:
        for module, name, value in ours:
            setattr(module, name, value)
        with registered(partial(create_handler, secret=secret_of(settings), is_here=is_this_host)):
            yield
    finally:
        for module, name, value in torchs:
            setattr(module, name, value)


@record
def run(argv: Sequence[str]) -> None:
    """Run a job to its end, as torch.distributed.run.main does: raises ChildFailedError when workers fail."""
    command = read(argv)
    settings, arguments = command.settings, command.torchrun
    if command.is_dry_run:
        show_dry_run(command)
        return
    node_check = NodeCheck(settings)
    node_check.before_joining()  # first of all: some rendezvous end for all nodes when one of them leaves
    with substituted(settings, node_check):
        torchrun.run(arguments)  # type: ignore[no-untyped-call]


def _raised_in(error: BaseException, *functions: Callable[..., Any]) -> bool:
    """Return whether ``error`` came out of one of ``functions``."""
    codes = {getattr(function, "__code__", None) for function in functions}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _exit(code: int, message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)


def _log_readably() -> None:
    """Our log lines to stderr; from torch's no second copy of a worker's traceback."""
    ours = logging.getLogger("fastckpt")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fastckpt-run: %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False
        logging.getLogger("fastckpt.report").setLevel(logging.INFO)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)


def _without_traceback(line: logging.LogRecord) -> bool:
    line.exc_info = None
    return True
