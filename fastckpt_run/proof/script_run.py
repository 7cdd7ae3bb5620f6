"""One run of a script for `fastckpt prove`: a launch with a checkpoint directory and a record of its own."""

import ast
import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastckpt._core.config import PROOF_VARIABLE, copy_of_environment
from fastckpt._core.policy.planned_kills import PlannedKill
from fastckpt._core.report.kill_notes import write_plan
from fastckpt.errors import ConfigError
from fastckpt_run.bound_launch import kill_bound
from fastckpt_run.proof.directory_setting import DirectorySetting
from fastckpt_run.proof.run_history import RunHistory, read_history

Starter = Callable[[Sequence[str], Mapping[str, str], int], "subprocess.Popen[bytes]"]
"""Starts fastckpt-run with arguments, an environment and a descriptor for its output."""
CHECKPOINTS, RECORD = "checkpoints", "record"
_PAUSE = 0.05
_SHOWN = 40


@dataclass(frozen=True)
class ProvedCommand:
    """Command to be run.

    Attributes:
        options: Of fastckpt-run, before the script.
        script: The script, or the name of a module.
        arguments: The script's, as the user gave them.
        setting: Setting of its checkpoint directory.
        restarts: The restarts that the user gives to the run with kills, if more than it needs.
        shm_dir: Directory for arenas of jobs with these options.
        tree: The script's source, if it can be read.
        logs: True if the user has given a place for the logs of workers.
    """

    options: Sequence[str]
    script: str
    arguments: Sequence[str]
    setting: DirectorySetting
    restarts: int = 0
    shm_dir: str = ""
    tree: ast.Module | None = None
    logs: bool = False


@dataclass(frozen=True)
class ScriptRun:
    """A run that has ended.

    Attributes:
        name: Its name.
        folder: Has its checkpoints and its record.
        code: The exit code of fastckpt-run.
        output: The end of its output.
        history: Records of its workers.
        seconds: Its duration.
    """

    name: str
    folder: Path
    code: int
    output: Sequence[str]
    history: RunHistory
    seconds: float

    @property
    def checkpoints(self) -> Path:
        """The checkpoint directory that the script was given."""
        return self.folder / CHECKPOINTS

    @property
    def record(self) -> Path:
        """The folder with the plan and the record."""
        return self.folder / RECORD


class ScriptRunner:
    """Runs a script again and again, each time with nothing left of the time before.

    Args:
        command: Command to be run.
        base: Each run has a folder in it.
        memory: Directory for arenas.
        start: Starts a launcher.
        timeout: Seconds that a run may take.
    """

    def __init__(self, command: ProvedCommand, base: Path, memory: Path, start: Starter, timeout: float) -> None:
        self._command, self._base, self._memory = command, base, memory
        self._start, self._timeout = start, timeout

    def run(self, name: str, kills: Sequence[PlannedKill] = ()) -> ScriptRun:
        """Run it to its end.

        Raises:
            ConfigError: It takes too long.
        """
        folder, begun = self._base / name, time.monotonic()
        record, checkpoints = folder / RECORD, folder / CHECKPOINTS
        record.mkdir(parents=True)
        checkpoints.mkdir()
        write_plan(record, str(checkpoints.resolve()), kills)
        command, given = self._command, str(checkpoints)
        environment = copy_of_environment() | {PROOF_VARIABLE: str(record)} | command.setting.environment(given)
        restarts = max(command.restarts, len(kills)) if kills else 0
        # The last one of an option counts. Kills may follow on each other without a step in between.
        options = [f"--max-restarts={restarts}", "--fast-max-stalls=0", f"--fast-shm-dir={self._memory}"]
        if not command.logs:
            options.append(f"--log-dir={folder / 'logs'}")
        script = [command.script, *command.setting.arguments(command.arguments, given)]
        arguments = [*command.options, *options, *script]
        with (folder / "output").open("wb") as output:
            process = self._start(arguments, environment, output.fileno())
        code = self._wait(process, begun + self._timeout)
        lines = (folder / "output").read_text(errors="replace").splitlines()
        history, shown = read_history(record), [line for line in lines if line.strip()][-_SHOWN:]
        return ScriptRun(name, folder, code, shown, history, time.monotonic() - begun)

    def _wait(self, process: "subprocess.Popen[bytes]", end: float) -> int:
        with contextlib.ExitStack() as on_exit:
            on_exit.callback(_end, process)
            while (code := process.poll()) is None:
                if time.monotonic() > end:
                    raise ConfigError(
                        f"{self._command.script} has not ended in {self._timeout:g} s: give more with "
                        "--timeout, or the script fewer steps"
                    )
                time.sleep(_PAUSE)
        return code


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Leave no process of a run that was broken off: nothing of it is wanted, so it is not asked to flush."""
    if process.poll() is None:
        kill_bound(process)
