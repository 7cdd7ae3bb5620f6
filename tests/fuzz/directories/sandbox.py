"""A user's home with a checkpoint directory that may lie; what an action did to it that it must not do."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.fuzz.directories.actions import Outcome, act
from tests.fuzz.directories.lies import Lie, of_entries
from tests.fuzz.directories.saved import NAME, save
from tests.support.forks import forked

DEADLINE_S = 10.0
WAITS = "waiting, for up to "
"""In a line of the log: a job waits, for a time that it says, for another that may use the directory."""


class Sandbox:
    """Gives each action the same directory again.

    Args:
        folder: For this alone; the home in it has the same path in each action, as some records have absolute ones.
        deadline: Seconds after which an action hangs.
    """

    def __init__(self, folder: Path, deadline: float = DEADLINE_S) -> None:
        self._deadline = deadline
        self.home, self._saved, self._folder = folder / "home", folder / "saved", folder
        self.directory = self.home / NAME
        self._to, self._shm = folder / "outcome", Path(os.environ["FASTCKPT_SHM_DIR"]) / "of-the-case"
        with self._memory():
            assert forked(lambda: save(self.home)) == 0
        self.home.rename(self._saved)
        self._newest = dict[str, int | None]()

    def lies(self) -> list[Lie]:
        """All of its entries."""
        self._restore()
        return [*of_entries(self.directory)]

    @contextmanager
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

    def _done(self, action: str, lie: Lie | None = None) -> Outcome:
        """What an action comes to."""
        self._restore()
        if lie:
            lie.tell(self.directory)
        self._before = entries(self.home)
        self._to.unlink(missing_ok=True)
        with self._memory():
            code = forked(lambda: act(action, self.directory, self._to), self._deadline)
        outcome = Outcome(**json.loads(self._to.read_text()))
        if code == -signal.SIGKILL and not any(WAITS in line for line in outcome.log):
            outcome.defects.append(f"{outcome.doing}: no end in {self._deadline:g} s")
        elif code not in (0, -signal.SIGKILL):
            output = self._to.with_suffix(".output").read_text(errors="replace")
            outcome.defects.append(f"{outcome.doing}: exit {code}: {output[-1500:]}")
        return outcome

    def _restore(self) -> None:
        for path in (self.home, self._folder / "replaced"):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        # With their times, and links between files.
        subprocess.run(["cp", "-a", self._saved, self.home], check=True)

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
        if outcome.durable:
            found += self._not_durable(outcome.durable)
        return found

    def _wrongly_loaded(self, action: str, lie: Lie, outcome: Outcome) -> Iterator[str]:
        if outcome.step is None:
            return
        if outcome.state_step == 0:
            yield "starts afresh beside checkpoints"
        elif outcome.state_step != outcome.step:
            yield f"step {outcome.step} was loaded, with the state of {outcome.state_step}"
        newest = self._newest[action]
        is_gone = lie.name.endswith("is nothing") or (
            (self._saved / NAME / lie.entry).is_dir()
            and " is a" in lie.name
            and ("link" not in lie.name or "hard link" in lie.name)
        )
        if outcome.step == newest or is_gone:
            return
        if not any(name in line for line in outcome.log for name in _names(lie.entry, newest)):
            yield f"step {outcome.step} instead of {newest} was loaded without a word of {lie.entry}"

    def _lost(self, lie: Lie) -> Iterator[str]:
        """Whole checkpoints of which nothing was a lie, and that are not what they were."""
        for place in sorted((self._saved / NAME).glob("checkpoint-[1-9]*")):
            if lie.entry.split("/")[0] == place.name or lie.entry in (".", ""):
                continue
            for path in place.iterdir():
                here = self.directory / place.name / path.name
                if not here.is_file() or here.read_bytes() != path.read_bytes():
                    yield f"{here} was lost"

    def _not_durable(self, step: int) -> Iterator[str]:
        store = CheckpointDirectory(self.directory)
        found = {stored.id.step: stored for stored in store.checkpoints()}
        if step not in found:
            yield f"step {step} was called durable, and is not there"
        else:
            store.verify(found[step])


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


def differences(before: dict[str, object], after: dict[str, object]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if name not in after or after[name] is None:
            yield f"{name} was removed"
        elif name not in before:
            yield f"{name} was made"
        elif before[name] != after[name]:
            yield f"{name} was changed"


def _names(entry: str, step: int | None) -> set[str]:
    """By what a line of a log may name what was not loaded."""
    return {f"step {step} "} | {
        part for part in entry.split("/") if part not in (".fastckpt", "model.pt", "manifest.json")
    }
