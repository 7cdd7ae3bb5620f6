"""Record of a worker in a run that `fastckpt prove` compares: its loads, logged values and saves; and its due kills.

Each line is written in one go before the worker goes on, so that a kill loses none.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastckpt._core import metrics
from fastckpt._core.config import RankInfo
from fastckpt._core.policy.planned_kills import BETWEEN, SAVE, PlannedKill
from fastckpt._core.report.kill_notes import allowed_place, claim, planned
from fastckpt.errors import ConfigError

REFUSAL = "the run was not tried: "


class RunRecord:
    """The record of this process, in a file for all processes of its rank.

    Args:
        folder: Has the plan of the run, and gets the records.
        place: The place of this process in the job.
        generators: The states of the global random generators, by name, as a checkpoint has them.
    """

    def __init__(self, folder: Path, place: RankInfo, generators: Callable[[], Mapping[str, Any]]) -> None:
        self._folder, self._pid = folder, os.getpid()
        self._generators: Callable[[], Mapping[str, Any]] | None = generators
        self._file = os.open(
            folder / f"rank-{place.rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        own = [kill for kill in planned(folder) if kill.rank == place.rank]
        self._between = [kill for kill in own if kill.kind == BETWEEN]
        self._in_saves = {kill: 0 for kill in own if kill.kind == SAVE}
        self._step = self._since = 0
        self._by_script = False
        self.write("begun", restart=place.restart_count, pid=self._pid)
        metrics.read_logged(self._logged)
        metrics.listen(self._happened)
        metrics.observe(self._entered)
        if self._between:
            register_optimizer_step_post_hook(self._stepped)

    @property
    def is_of_this_process(self) -> bool:
        """True if this process made the record; False if it inherited the record by a fork."""
        return self._pid == os.getpid()

    def write(self, what: str, step: int = -1, **more: Any) -> None:
        """Record that something happened."""
        line = json.dumps({"what": what, "step": step, "time": time.time(), **more}).encode() + b"\n"
        os.write(self._file, line)
        if step >= 0:
            self._reach(step, 0)

    def reach(self, step: int) -> None:
        """Note a step of a script that names each, so that all steps of optimizers up to the next are one."""
        self._by_script = True
        self._reach(step, 0)

    def _reach(self, step: int, since: int) -> None:
        """The training is so many steps beyond a step that it named: a kill may be due."""
        self._step, self._since = step, since
        for kill in self._between:
            if step + since >= kill.step:
                self._kill(kill, "between steps", step + since)

    def _kill(self, kill: PlannedKill, phase: str, step: int) -> None:
        if claim(self._folder, kill, phase, step):
            os.kill(os.getpid(), signal.SIGKILL)

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        if self.is_of_this_process:
            self._reach(self._step, 1 if self._by_script else self._since + 1)

    def _logged(self, step: int, values: Mapping[str, float]) -> None:
        if self.is_of_this_process:
            # As hexadecimal numbers, which are exact.
            self.write("logged", step, values={name: value.hex() for name, value in values.items()})

    def _happened(self, event: dict[str, Any]) -> None:
        if event["event"] == "saved" and self.is_of_this_process:
            if self._generators is not None:
                # Generators that no script has seeded differ from run to run here already, before any kill.
                states, self._generators = self._generators(), None
                self.write("generators", states={name: _digest(state) for name, state in states.items()})
            self.write("saved", int(event["step"]))

    def _entered(self, phase: str, fields: dict[str, Any]) -> None:
        if not (self._in_saves and phase.startswith("snapshot.") and self.is_of_this_process):
            return
        for kill, seen in self._in_saves.items():
            if fields.get("step", -1) >= kill.step:
                if seen == kill.skip:
                    self._kill(kill, phase, int(fields["step"]))
                self._in_saves[kill] = seen + 1


def _digest(state: Any) -> str:
    digest = hashlib.sha256()
    for part in _parts(state):
        digest.update(part)
    return digest.hexdigest()


def _parts(state: Any) -> Iterator[bytes]:
    """The bytes of a state of tensors, numbers and texts."""
    if isinstance(state, torch.Tensor):
        yield bytes(state.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())
    elif isinstance(state, Mapping | list | tuple):
        for each in state.items() if isinstance(state, Mapping) else state:
            yield from _parts(each)
    else:
        yield repr(state).encode()


_records: list[RunRecord] = []


def begin(folder: Path, directory: str, place: RankInfo, generators: Callable[[], Mapping[str, Any]]) -> None:
    """Record this process from now on, which opens a checkpoint directory; the others are as in `RunRecord`.

    Raises:
        ConfigError: The directory is not below the one that was given to the script: it may have checkpoints of the
            user's.
    """
    within = allowed_place(folder)
    is_within = Path(directory).is_relative_to(within)
    if not (_records and _records[-1].is_of_this_process):
        _records[:] = [RunRecord(folder, place, generators)]
    _records[-1].write("opened", directory=directory, within=is_within)
    if not is_within:
        raise ConfigError(f"{REFUSAL}its checkpoint directory is {directory}, which is not {within} that it was given")


def note(what: str, step: int = -1, **more: Any) -> None:
    """Record that something happened, if this process has a record."""
    if _records and _records[-1].is_of_this_process:
        _records[-1].write(what, step, **more)


def reach(step: int) -> None:
    """Note a step that the script has named, if this process has a record."""
    if _records and _records[-1].is_of_this_process:
        _records[-1].reach(step)
