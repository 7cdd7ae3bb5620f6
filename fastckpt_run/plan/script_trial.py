"""A trial of a script: it runs until its first saves are in memory, and leaves nothing.

It has memory of its own and a checkpoint directory that must be empty, so that no checkpoint of the user's is opened,
overwritten or superseded (`admission.demand_empty`). Its own checkpoints there are removed.
"""

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastckpt._core.config import TRIAL_VARIABLE, copy_of_environment, variable
from fastckpt._core.inspect.checkpoint_sizes import CheckpointSizes, checkpoint_sizes
from fastckpt._core.memory.census import ArenaEntry, census
from fastckpt._core.memory.processes import own_memory
from fastckpt._core.report.events import read
from fastckpt._core.report.report import Report, report
from fastckpt.errors import ConfigError, FastckptError
from fastckpt_run.bound_launch import end_bound, orderly_end, own_memory_place, start_bound
from fastckpt_run.plan.trial_storage import Remains, clear

PREFIX = "fastckpt-plan-"
PAUSE = 0.1
STEPS = 10
"""Saves that are waited for after the first, to measure their cost; at most `LONGEST`."""
LONGEST = 20.0
REFUSAL = "the script was not tried: "
CLOCKS = 0.1
"""Seconds by which the times of files may be behind the clock, which the kernel reads at each tick."""
_SHOWN = 20


@dataclass
class ScriptTrial:
    """The results of a trial.

    Attributes:
        directory: The script's checkpoint directory.
        sizes: Of a save in memory.
        arena: Bytes that its arena took, with so many ``slots`` in use.
        processes: Bytes of the memory of the agent and the workers, without shared memory; None if they ended first.
        report: Of its events.
        others: Further checkpoint directories of the script, which are not part of the plan.
        left: Files left in the directory.
    """

    directory: str
    sizes: CheckpointSizes
    arena: int
    slots: int
    processes: int | None
    report: Report
    others: list[str] = field(default_factory=list)
    left: Remains = field(default_factory=Remains)


def try_script(
    command: Sequence[str], ranks: int, shm_dir: str, timeout: float, tell: Callable[[str], None]
) -> ScriptTrial:
    """Run a script with so many workers on this host until its first save is in memory, and end it.

    Args:
        command: The script and its arguments.
        ranks: Workers.
        shm_dir: The tmpfs that holds arenas.
        timeout: Seconds until its first save.
        tell: Called with a line for people.

    Raises:
        ConfigError: Its directory is not empty, or it does not come to a save.
    """
    # 1. places of its own: memory, events, output   2. launch   3. the first save of all ranks, then a few more
    # 4. measure   5. end it by a signal, with a flush   6. remove its checkpoints, and report
    with contextlib.ExitStack() as on_exit:
        on_exit.enter_context(orderly_end())
        folder = Path(on_exit.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
        memory = on_exit.enter_context(own_memory_place(PREFIX, shm_dir))
        launch, left = _Launch(command, ranks, folder, memory), dict[str, Remains]()
        try:
            with launch:
                tell(f"running {command[0]} with {ranks} workers until its first saves are in memory")
                try:
                    entry, sizes = launch.until_saved(timeout)
                except ConfigError:
                    for line in launch.last_lines():
                        tell(f"| {line}")
                    raise
        finally:
            left = launch.clear()
        slots = sum(save is not None for save in entry.slots.values())
        found = report([read(launch.events)])
    others = sorted(left.keys() - {entry.directory})
    return ScriptTrial(
        entry.directory,
        sizes,
        entry.size,
        slots,
        launch.processes or None,
        found,
        others,
        left.get(entry.directory, Remains()),
    )


class _Launch:
    """A launcher that runs the script; at its end it is asked to end, and after a while killed."""

    def __init__(self, command: Sequence[str], ranks: int, folder: Path, memory: Path) -> None:
        self._command, self._ranks, self._memory = command, ranks, memory
        self.events, self._output, self._record = (folder / name for name in ("events", "output", "directories"))
        self._begun = time.time()
        self._process: subprocess.Popen[bytes] | None = None
        self.processes = 0  # the most that was seen: a short script may end before the last look
        settings = {"shm_dir": str(memory), "events": str(self.events), "event_log": "0", "flush": "1"}
        self._environment = {variable(name): value for name, value in settings.items()} | {
            TRIAL_VARIABLE: str(self._record)
        }

    @property
    def pid(self) -> int:
        """The launcher's."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> None:
        options = ["--standalone", "--nnodes=1", f"--nproc-per-node={self._ranks}", "--max-restarts=0"]
        options += [f"--log-dir={self._output.with_name('logs')}"]
        with self._output.open("wb") as output:
            arguments = [*options, *self._command]
            self._process = start_bound(arguments, copy_of_environment() | self._environment, output.fileno())

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        end_bound(self._process)

    def clear(self) -> dict[str, Remains]:
        """Remove its checkpoints, after its end; returns the remains, by directory."""
        found = {str(line["directory"]): float(line["modified"]) for line in _lines(self._record)}
        # One that was empty before, and had nothing since long, is the user's: it stays.
        since = self._begun - CLOCKS
        return {name: clear(Path(name), self.pid, is_new=modified >= since) for name, modified in found.items()}

    def until_saved(self, timeout: float) -> tuple[ArenaEntry, CheckpointSizes]:
        """Wait for the first save of all ranks, and for a few more, but not for long."""
        end, enough, seen = time.monotonic() + timeout, 0.0, None
        while True:
            seen = self._largest() or seen
            now, running = time.monotonic(), self._process is not None and self._process.poll() is None
            if seen is not None and running:
                self.processes = max(self.processes, own_memory(self.pid))
            if seen is not None and not enough:
                enough = now + LONGEST
            if seen is not None and (now > enough or not running or self._saves() > STEPS):
                return seen
            if not running or now > end:
                why = "ended before its first save" if not running else f"has saved nothing in {timeout:g} s"
                raise ConfigError(self._refusal() or f"{self._command[0]} {why}")
            time.sleep(PAUSE)

    def _saves(self) -> int:
        return len({event.get("step") for event in _lines(self.events) if event.get("event") == "saved"})

    def _largest(self) -> tuple[ArenaEntry, CheckpointSizes] | None:
        """The arena that takes most memory, and the sizes of its newest whole save."""
        with contextlib.suppress(FastckptError, OSError):
            entry = max(
                (each for each in census(self._memory) if each.newest), key=lambda each: each.size, default=None
            )
            if entry is not None:
                return entry, checkpoint_sizes(f"{entry.directory}@latest:memory", str(self._memory))
        return None

    def _refusal(self) -> str:
        text = self._output.read_text(errors="replace")
        return next((f"{REFUSAL}{line.partition(REFUSAL)[2]}" for line in text.splitlines() if REFUSAL in line), "")

    def last_lines(self) -> list[str]:
        """The end of its output."""
        lines = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        return [line for line in lines if line.strip()][-_SHOWN:]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in a file that may still grow."""
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event
