"""A user's home with a checkpoint directory that may lie; what an action did to it that it must not do."""

import contextlib
import importlib
import logging
import os
import resource
import shutil
import subprocess
import traceback
import warnings
from collections.abc import Callable, Iterator
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
from fastckpt_run.events import summary
from fastckpt_run.events.log_file import EventLog
from tests.fuzz.directories.lies import Lie
from tests.fuzz.directories.saved import NAME, STEPS, Sharded, one_process, save, state_of, step_of
from tests.fuzz.forked import forked

PATIENCE_S = 2.0
"""Seconds that a job, and then its end, waits for a save that cannot become durable."""
MEMORY = 2 << 30
"""Bytes that an action may map: what reads without end ends there."""
NEXT = 50
"""The step that a job saves, after all that were saved."""


class Acting(logging.Handler):
    """Does the parts of an action, and takes note of what is wrong with what comes of them.

    Attributes:
        wrong: Errors that no user should see, or that name no file, and states that should not have been loaded.
    """

    def __init__(self, directory: Path, entry: str, *, sharded: bool) -> None:
        super().__init__(logging.INFO)
        self.wrong: list[str] = []
        self._said: list[str] = []
        self._directory, self._entry, self._sharded = directory, entry, sharded

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    def do(self, name: str, act: Callable[[], Any]) -> Any:
        """Do one part; what it returns, None if that was an error."""
        try:
            return act()
        except FastckptError as error:
            self._tells(f"{name}: {error}")
        except BaseException as error:
            self.wrong.append(f"{name}: {''.join(traceback.format_exception(error)[-4:])[-900:]}")
        return None

    def _tells(self, error: str) -> None:
        if str(self._directory) not in error:
            self.wrong.append(f"names no file: {error}")

    def command(self, name: str, *arguments: object) -> None:
        def run() -> None:
            result = CliRunner().invoke(main, [name, *map(str, arguments)])
            if result.exception and not isinstance(result.exception, SystemExit):
                raise result.exception
            if result.exit_code == 2:
                self._tells(f"fastckpt {name}: {result.stderr.strip()}")
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
        self.do("log", lambda: summary._has_log(str(directory)))
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
        strategy = KeepLatestStepStrategy(1, str(directory)) if saves else None
        with DdpCheckpointer(directory, strategy) as checkpointer:
            state = checkpointer.load_checkpoint(path)
            self._loaded(checkpointer.loaded_step, step_of(state))
            if not saves:
                return
            checkpointer.save_checkpoint(NEXT, state_of(NEXT), storage_type=StorageType.DISK)
            try:
                is_durable = checkpointer.wait_latest_checkpoint(PATIENCE_S) == NEXT
            except TimeoutError as error:
                self._tells(f"save: {error}")
                return
        if is_durable:
            store = CheckpointDirectory(directory)
            store.verify(next(stored for stored in store.checkpoints() if stored.id.step == NEXT))

    def _load_shards(self, directory: Path, path: str = "") -> None:
        with one_process(), FsdpShardCheckpointer(directory) as checkpointer:
            sharded = Sharded()
            checkpointer.load_checkpoint(sharded.model, sharded.optimizer, path)
            self._loaded(checkpointer.loaded_step, sharded.step if checkpointer.loaded_step >= 0 else 0)

    def _loaded(self, step: int, state_step: int | None) -> None:
        """It is what was saved under its step; an older one than the newest is loaded with a word of the lie."""
        ours = (".fastckpt", "model.pt", "manifest.json")
        words = {f"step {STEPS[-1]} "} | {part for part in self._entry.split("/") if part not in ours}
        if state_step != step:
            self.wrong.append(f"step {step} was loaded, with the state of {state_step}")
        elif step != STEPS[-1] and not any(word in line for line in self._said for word in words):
            self.wrong.append(f"step {step} was loaded without a word of {self._entry}")


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

    def _act(self, action: str, lie: Lie) -> None:
        """In a fork; nothing is written to the terminal."""
        torch.set_num_threads(1)
        output = os.open(self._folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        warnings.simplefilter("ignore")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        os.environ["FASTCKPT_FLUSH_TIMEOUT"] = str(PATIENCE_S)
        acting = Acting(self.directory, lie.entry, sharded=self._sharded)
        logging.basicConfig(handlers=[acting], level=logging.INFO, force=True)
        logging.getLogger("fastckpt").propagate = True
        getattr(acting, action)()
        assert not acting.wrong, acting.wrong

    def wrongs(self, action: str, lie: Lie) -> list[str]:
        """What an action did on the word of a lie that it must not do, in words."""
        for path in (self.home, self._folder / "replaced"):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        # With their times, and links between files.
        subprocess.run(["cp", "-a", self._saved, self.home], check=True)
        lie.tell(self.directory)
        before = entries(self.home)
        with self._memory():
            code = forked(lambda: self._act(action, lie))
        found = [f"outside: {each}" for each in differences(before, entries(self.home))]
        if code:
            found.append(f"exit {code}: {(self._folder / 'output').read_text(errors='replace')[-3000:]}")
        return found + (self._lost(lie) if action in ("look", "load", "resume") else [])

    def _lost(self, lie: Lie) -> list[str]:
        """Whole checkpoints of which nothing was a lie, and that are not what they were."""
        found = []
        for path in sorted((self._saved / NAME).glob("checkpoint-[1-9]*/*")):
            here = self.directory / path.parent.name / path.name
            is_told = lie.entry.split("/")[0] == path.parent.name or not lie.entry
            if not is_told and (not here.is_file() or here.read_bytes() != path.read_bytes()):
                found.append(f"{here} was lost")
        return found


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
