"""A user's home with a checkpoint directory that may lie; what an action did to it that it must not do."""

import contextlib
import importlib
import json
import logging
import os
import resource
import shutil
import subprocess
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.foreign_files import foreign
from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.errors import FastckptError
from fastckpt.fsdp import FsdpShardCheckpointer
from fastckpt_run.cli import main
from fastckpt_run.events.log_file import EventLog
from tests.fuzz.directories.lies import Lie
from tests.fuzz.directories.saved import NAME, Sharded, one_process, save, state_of, step_of
from tests.fuzz.forked import forked

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
        step: What was loaded: by its name; None if nothing was.
        state_step: What was loaded: by its contents, 0 for a fresh start, None for a state that nobody saved.
        is_durable: Whether the step that was saved is.
        errors: Errors that users see, each with what it befell.
        defects: Errors that no user should see.
        log: All lines of the log.
    """

    step: int | None = None
    state_step: int | None = None
    is_durable: bool = False
    errors: list[str] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


class Acting(logging.Handler):
    """Does the parts of an action."""

    def __init__(self, directory: Path, *, sharded: bool) -> None:
        super().__init__(logging.INFO)
        self.outcome = Outcome()
        self._directory, self._sharded = directory, sharded

    def emit(self, record: logging.LogRecord) -> None:
        self.outcome.log.append(record.getMessage()[:2000])

    def do(self, name: str, act: Callable[[], Any]) -> Any:
        """Do one part; what it returns, None if that was an error."""
        try:
            return act()
        except FastckptError as error:
            self.outcome.errors.append(f"{name}: {type(error).__name__}: {error}")
        except BaseException as error:
            self.outcome.defects.append(f"{name}: {''.join(traceback.format_exception(error)[-4:])[-900:]}")
        return None

    def command(self, name: str, *arguments: object) -> None:
        def run() -> None:
            result = CliRunner().invoke(main, [name, *map(str, arguments)])
            if result.exception and not isinstance(result.exception, SystemExit):
                raise result.exception
            if result.exit_code == 2:
                self.outcome.errors.append(f"fastckpt {name}: {result.stderr.strip()}")
            else:
                assert result.exit_code in (0, 1) and "Traceback" not in result.output, result.output[-500:]

        self.do(f"fastckpt {name}", run)

    def look(self) -> None:
        """Whatever only reads."""
        directory, store = self._directory, CheckpointDirectory(self._directory)
        self.do("scan", store.scan)
        self.do("known", store.known)
        self.do("identity", store.identity)
        self.do("histories", lambda: [store.histories.read(n) for n in (1, store.histories.newest(fresh=False))])
        with contextlib.suppress(OSError):
            self.do("foreign", lambda: foreign(directory))
        self.command("ls", directory)
        self.command("ls", directory, "--json")
        self.command("which", directory)
        self.command("verify", directory, "--all")
        self.command("show", f"{directory}@latest")
        self.command("diff", f"{directory}/checkpoint-2", f"{directory}@3")
        self.command("export", f"{directory}@3", directory.parent.parent / "exported.pt", "--force")
        if (directory / ".fastckpt/events").exists():
            self.command("report", directory)

    def load(self) -> None:
        """A plain Python process that loads."""
        self.do("load", lambda: (self._load_shards if self._sharded else self._train)(self._directory))

    def resume(self) -> None:
        """A process that loads a checkpoint by its path, for a directory of its own."""
        own, path = self._directory.parent.parent / "own", str(self._directory / "checkpoint-3")
        shutil.rmtree(own, ignore_errors=True)
        self.do("resume", lambda: (self._load_shards if self._sharded else self._train)(own, path))

    def job(self) -> None:
        """A job that loads, and saves; all but the newest are deleted."""
        self.do("job", lambda: self._train(self._directory, saves=True))
        self.do("events", lambda: EventLog(self._directory, [b'{"event": "job_ended"}\n']).close(1.0))

    def prune(self) -> None:
        """A deletion by hand."""
        self.command("prune", self._directory, "--keep-last", "1", "--yes")

    def tidy(self) -> None:
        """What a job does at its start and afterwards, one by one."""
        store = CheckpointDirectory(self._directory)
        self.do("settle", store.settle)
        self.do("sweep", store.sweep)
        scan = self.do("scan", store.scan)
        for bad, why in scan.damaged if scan else ():
            self.do(f"quarantine {bad}", lambda bad=bad, why=why: store.quarantine(bad, why))
        for stored in scan.distinct[1:] if scan else ():
            self.do(f"delete {stored.id}", lambda id=stored.id: store.delete(id))
        self.do("mark", lambda: store.mark("c" * 32))
        self.do("sweep", store.sweep)

    def _train(self, directory: Path, path: str = "", *, saves: bool = False) -> None:
        outcome, strategy = self.outcome, KeepLatestStepStrategy(1, str(directory)) if saves else None
        with DdpCheckpointer(directory, strategy) as checkpointer:
            state = checkpointer.load_checkpoint(path)
            outcome.step, outcome.state_step = checkpointer.loaded_step, step_of(state)
            if saves:
                checkpointer.save_checkpoint(NEXT, state_of(NEXT), storage_type=StorageType.DISK)
                try:
                    outcome.is_durable = checkpointer.wait_latest_checkpoint(PATIENCE_S) == NEXT
                except TimeoutError as error:
                    outcome.errors.append(f"save: {error}")

    def _load_shards(self, directory: Path, path: str = "") -> None:
        with one_process(), FsdpShardCheckpointer(directory) as checkpointer:
            sharded = Sharded()
            checkpointer.load_checkpoint(sharded.model, sharded.optimizer, path)
            self.outcome.step = checkpointer.loaded_step
            self.outcome.state_step = sharded.step if checkpointer.loaded_step >= 0 else 0


class Sandbox:
    """Gives each action the same directory again.

    Args:
        kind: "left" or "shard", as `saved.save` takes it.
        folder: For this alone; the home in it has the same path in each action, as some records have absolute ones.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._sharded = kind == "shard"
        self.home, self._saved, self._folder = folder / "home", folder / "saved", folder
        self.directory = self.home / NAME
        if self._sharded:
            importlib.import_module("torch._dynamo")  # once, and not in each fork: sharding asks it
        self._shm = Path(os.environ["FASTCKPT_SHM_DIR"]) / "of-the-case"
        with self._memory():
            assert forked(lambda: save(kind, self.home)) == 0
        self.home.rename(self._saved)
        self._newest = dict[str, int | None]()

    @contextlib.contextmanager
    def _memory(self) -> Iterator[None]:
        """Shared memory of one action: what a killed one leaves there is removed."""
        self._shm.mkdir()
        before = os.environ["FASTCKPT_SHM_DIR"]
        os.environ["FASTCKPT_SHM_DIR"] = str(self._shm)
        try:
            yield
        finally:
            os.environ["FASTCKPT_SHM_DIR"] = before
            shutil.rmtree(self._shm)
            for path in Path("/dev/shm").glob(f"*{str(self._shm).removeprefix('/dev/shm/').replace('/', '.')}*"):
                path.unlink()

    def _act(self, action: str, to: Path) -> None:
        """In a fork; nothing is written to the terminal."""
        torch.set_num_threads(1)
        output = os.open(self._folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        warnings.simplefilter("ignore")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        os.environ["FASTCKPT_FLUSH_TIMEOUT"] = str(PATIENCE_S)
        acting = Acting(self.directory, sharded=self._sharded)
        logging.basicConfig(handlers=[acting], level=logging.INFO, force=True)
        logging.getLogger("fastckpt").propagate = True
        getattr(acting, action)()
        to.write_text(json.dumps(asdict(acting.outcome)))

    def _done(self, action: str, lie: Lie | None = None) -> Outcome:
        """What an action comes to."""
        for path in (self.home, self._folder / "replaced"):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        # With their times, and links between files.
        subprocess.run(["cp", "-a", self._saved, self.home], check=True)
        if lie:
            lie.tell(self.directory)
        self._before, to = entries(self.home), self._folder / "outcome"
        with self._memory():
            code = forked(lambda: self._act(action, to))
        output = (self._folder / "output").read_text(errors="replace")
        assert code == 0, f"{lie}: exit {code}: {output[-1500:]}"
        return Outcome(**json.loads(to.read_text()))

    def wrongs(self, action: str, lie: Lie) -> list[str]:
        """What an action did on the word of a lie that it must not do, in words."""
        if action in ("load", "resume", "job") and action not in self._newest:
            self._newest[action] = self._done(action).step
        outcome = self._done(action, lie)
        found = [f"outside: {each}" for each in differences(self._before, entries(self.home))]
        found += outcome.defects
        found += [f"names no file: {error}" for error in outcome.errors if str(self.directory) not in error]
        found += self._wrongly_loaded(action, lie, outcome)
        if action in ("look", "load", "resume"):
            found += self._lost(lie)
        if outcome.is_durable:
            store = CheckpointDirectory(self.directory)
            store.verify(next(stored for stored in store.checkpoints() if stored.id.step == NEXT))
        return found

    def _wrongly_loaded(self, action: str, lie: Lie, outcome: Outcome) -> Iterator[str]:
        if outcome.step is None:
            return
        if outcome.state_step == 0:
            yield "starts afresh beside checkpoints"
        elif outcome.state_step != outcome.step:
            yield f"step {outcome.step} was loaded, with the state of {outcome.state_step}"
        newest = self._newest[action]
        ours = (".fastckpt", "model.pt", "manifest.json")
        words = {f"step {newest} "} | {part for part in lie.entry.split("/") if part not in ours}
        if outcome.step != newest and not any(word in line for line in outcome.log for word in words):
            yield f"step {outcome.step} instead of {newest} was loaded without a word of {lie.entry}"

    def _lost(self, lie: Lie) -> Iterator[str]:
        """Whole checkpoints of which nothing was a lie, and that are not what they were."""
        for path in sorted((self._saved / NAME).glob("checkpoint-[1-9]*/*")):
            here = self.directory / path.parent.name / path.name
            is_told = lie.entry.split("/")[0] == path.parent.name or not lie.entry
            if not is_told and (not here.is_file() or here.read_bytes() != path.read_bytes()):
                yield f"{here} was lost"


def entries(home: Path) -> dict[str, object]:
    """All that is in a home but in its checkpoint directory: names, kinds, modes, inodes, times, contents."""
    found = dict[str, object]()
    for at, directories, files in os.walk(home):
        if Path(at) == home:
            directories.remove(NAME) if NAME in directories else None
        for path in (Path(at), *(Path(at) / name for name in files)):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            known = (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, status.st_uid)
            found[str(path.relative_to(home))] = (*known, content)
    directory = (home / NAME).lstat() if os.path.lexists(home / NAME) else None
    return {**found, NAME: directory and (directory.st_mode, directory.st_ino)}


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
