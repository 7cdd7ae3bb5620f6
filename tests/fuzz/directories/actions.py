"""What is done with a directory that may lie: each in a process of its own, which writes down what came of it."""

import json
import logging
import os
import resource
import shutil
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.foreign_files import foreign
from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.errors import FastckptError
from fastckpt_run.cli import main
from fastckpt_run.events.log_file import EventLog
from tests.fuzz.directories.saved import state_of, step_of

PATIENCE_S = 2.0
"""Seconds that a job, and then its end, waits for a save that cannot become durable."""
MEMORY = 2 << 30
"""Bytes that an action may map: what reads without end ends there."""
NEXT = 50
"""The step that a job saves, after all that were saved."""


@dataclass
class Outcome:
    """What came of an action.

    Attributes:
        doing: The part of it that was begun last.
        step: What was loaded: by its name; None if nothing was.
        state_step: What was loaded: by its contents, 0 for a fresh start, None for a state that nobody saved.
        durable: The step that was saved and is durable; None if none was.
        errors: Errors that users see, each with what it befell.
        defects: Errors that no user should see.
        log: All lines of the log.
    """

    doing: str = ""
    step: int | None = None
    state_step: int | None = None
    durable: int | None = None
    errors: list[str] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


class Acting(logging.Handler):
    """Does the parts of an action, and writes the outcome to a file after each."""

    def __init__(self, to: Path) -> None:
        super().__init__(logging.INFO)
        self.outcome = Outcome()
        self._to = to

    def emit(self, record: logging.LogRecord) -> None:
        self.outcome.log.append(record.getMessage()[:2000])
        self.note()  # it may be ended at any time

    def note(self) -> None:
        draft = self._to.with_suffix(".new")
        draft.write_text(json.dumps(asdict(self.outcome)))
        draft.rename(self._to)

    def do(self, name: str, act: Callable[[], Any]) -> Any:
        """Do one part; what it returns, None if that was an error."""
        self.outcome.doing = name
        self.note()
        try:
            return act()
        except FastckptError as error:
            self.outcome.errors.append(f"{name}: {type(error).__name__}: {error}")
        except BaseException as error:
            trace = "".join(traceback.format_exception(error)[-3:])
            self.outcome.defects.append(f"{name}: {type(error).__name__}: {str(error)[:300]}: {trace[-600:]}")
        return None

    def command(self, *arguments: object) -> None:
        self.do(f"fastckpt {arguments[0]}", lambda: self._command(*map(str, arguments)))

    def _command(self, *arguments: str) -> None:
        result = CliRunner().invoke(main, arguments)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code == 2:
            self.outcome.errors.append(f"fastckpt {arguments[0]}: {result.stderr.strip()}")
        elif result.exit_code not in (0, 1) or "Traceback" in result.output:
            self.outcome.defects.append(f"fastckpt {arguments[0]}: exit {result.exit_code}: {result.output[-500:]}")


def look(acting: Acting, directory: Path) -> None:
    """Whatever only reads."""
    store = CheckpointDirectory(directory)
    acting.do("scan", store.scan)
    acting.do("known", store.known)
    acting.do("identity", store.identity)
    acting.do("histories", lambda: [store.histories.read(n) for n in (1, store.histories.newest(fresh=False))])
    acting.do("foreign", lambda: _foreign(directory))
    acting.command("ls", directory)
    acting.command("ls", directory, "--json")
    acting.command("which", directory)
    acting.command("verify", directory, "--all")
    acting.command("show", f"{directory}@latest")
    acting.command("diff", f"{directory}/checkpoint-2", f"{directory}@3")
    acting.command("export", f"{directory}@3", directory.parent.parent / "exported.pt", "--force")
    if (directory / ".fastckpt/events").exists():
        acting.command("report", directory)


def _foreign(directory: Path) -> None:
    with suppress(OSError):
        foreign(directory)


def load(acting: Acting, directory: Path) -> None:
    """A plain Python process that loads."""
    acting.do("load", lambda: _train(acting.outcome, directory, saves=False))


def resume(acting: Acting, directory: Path) -> None:
    """A process that loads a checkpoint by its path, for a directory of its own."""
    own = directory.parent.parent / "own"
    shutil.rmtree(own, ignore_errors=True)
    acting.do("resume", lambda: _train(acting.outcome, own, saves=False, path=str(directory / "checkpoint-3")))


def job(acting: Acting, directory: Path) -> None:
    """A job that loads, and saves; all but the newest are deleted."""
    acting.do("job", lambda: _train(acting.outcome, directory, saves=True))
    acting.do("events", lambda: EventLog(directory, [b'{"event": "job_ended"}\n']).close(1.0))


def _train(outcome: Outcome, directory: Path, *, saves: bool, path: str = "") -> None:
    strategy = KeepLatestStepStrategy(1, str(directory)) if saves else None
    with DdpCheckpointer(directory, strategy) as checkpointer:
        state = checkpointer.load_checkpoint(path)
        outcome.step, outcome.state_step = checkpointer.loaded_step, step_of(state)
        if saves:
            step = max(NEXT, checkpointer.loaded_step + 1)
            checkpointer.save_checkpoint(step, state_of(step), storage_type=StorageType.DISK)
            try:
                outcome.durable = step if checkpointer.wait_latest_checkpoint(PATIENCE_S) == step else None
            except TimeoutError as error:
                outcome.errors.append(f"save: {error}")


def prune(acting: Acting, directory: Path) -> None:
    """A deletion by hand."""
    acting.command("prune", directory, "--keep-last", "1", "--yes")


def tidy(acting: Acting, directory: Path) -> None:
    """What a job does at its start and afterwards, one by one."""
    store = CheckpointDirectory(directory)
    acting.do("settle", store.settle)
    acting.do("sweep", store.sweep)
    scan = acting.do("scan", store.scan)
    for bad, why in scan.damaged if scan else ():
        acting.do(f"quarantine {bad}", lambda bad=bad, why=why: store.quarantine(bad, why))
    for stored in scan.distinct[1:] if scan else ():
        acting.do(f"delete {stored.id}", lambda id=stored.id: store.delete(id))
    acting.do("mark", lambda: store.mark("c" * 32))
    acting.do("sweep", store.sweep)


ACTIONS: dict[str, Callable[..., None]] = {each.__name__: each for each in (look, load, resume, job, prune, tidy)}


def act(name: str, directory: Path, to: Path) -> None:
    """Do this in this process, and have its outcome in a file; nothing is written to the terminal."""
    torch.set_num_threads(1)
    output = os.open(to.with_suffix(".output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    warnings.simplefilter("ignore")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    os.environ["FASTCKPT_FLUSH_TIMEOUT"] = str(PATIENCE_S)
    acting = Acting(to)
    logging.basicConfig(handlers=[acting], level=logging.INFO, force=True)
    logging.getLogger("fastckpt").propagate = True
    ACTIONS[name](acting, directory)
    acting.outcome.doing = ""
    acting.note()
    os._exit(0)
