"""A contender's turn: a fresh process with folders of its own, which may start jobs under fastckpt-run."""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.results import ROOT

LIMIT = 600.0
"""Seconds that a turn, or a job within one, may take."""
PATIENCE = 10.0
"""Seconds within which what was killed must have ended."""
JOB = "FASTCKPT_BENCHMARK_JOB"
Record = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """Turn of a contender: the size of the state, and the folders to which it may write.

    Args:
        gigabytes: Size of the state.
        is_quick: True if a rough answer is enough.
        folder: An empty directory on storage.
        shm: An empty directory in shared memory.
        number: Of the round, for what is drawn by chance, but alike for all contenders of a round.
    """

    gigabytes: float
    is_quick: bool
    folder: Path
    shm: Path
    number: int = 0

    def job(
        self,
        function: Callable[..., None],
        *arguments: object,
        options: Sequence[str] = (),
        workers: int = 1,
        launcher: str | Sequence[str] = "fastckpt_run",
        environment: dict[str, str] | None = None,
    ) -> list[Record]:
        """Run a function as the script of a job, and give what its workers recorded and the agent's events.

        Args:
            function: At the top of its module, called in each worker with this turn and the arguments.
            arguments: Of the function, which JSON can carry.
            options: Of the launcher.
            workers: Processes.
            launcher: Its module; or its command, which may be of another environment.
            environment: Variables in addition.
        """
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="job-") as name:
            records, events = Path(name) / "records", Path(name) / "events"
            job: dict[str, Any] = {"module": function.__module__, "function": function.__qualname__}
            job |= {"arguments": arguments, "turn": self._as_json(), "records": str(records)}
            command = [sys.executable, "-m", launcher] if isinstance(launcher, str) else [*launcher]
            command += ["--standalone", f"--nproc-per-node={workers}", *options, "-m", "benchmarks.harness.turn"]
            own = {"FASTCKPT_SHM_DIR": str(self.shm), "FASTCKPT_EVENTS": str(events), "TMPDIR": name}
            own |= {JOB: json.dumps(job), "PYTHONPATH": str(ROOT), **(environment or {})}
            _run(command, os.environ | own)
            lines = [line for path in (records, events) if path.exists() for line in path.read_text().splitlines()]
            return [json.loads(line) for line in lines]

    def _as_json(self) -> dict[str, Any]:
        return {
            "gigabytes": self.gigabytes,
            "is_quick": self.is_quick,
            "folder": str(self.folder),
            "shm": str(self.shm),
            "number": self.number,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Turn":
        """The inverse of what is given to a process."""
        folder, shm = Path(values["folder"]), Path(values["shm"])
        return cls(values["gigabytes"], values["is_quick"], folder, shm, values["number"])


def record(**values: Any) -> None:
    """Add a line to what a job's workers recorded; whole lines, also from several of them."""
    path = json.loads(os.environ[JOB])["records"]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, (json.dumps(values) + "\n").encode())
    finally:
        os.close(fd)


def values_of(records: Sequence[Record], key: str) -> list[float]:
    """All values of a key, flat."""
    found = [each[key] for each in records if key in each]
    return [v for value in found for v in (value if isinstance(value, list) else [value])]


def take(module: str, contender: str, gigabytes: float, is_quick: bool, number: int) -> dict[str, list[float]]:
    """Have a contender of a benchmark's module take its turn in a fresh process; give what it measured."""
    with _folders() as (folder, shm):
        turn = Turn(gigabytes, is_quick, folder, shm, number)
        answer = folder / "answer"
        command = [sys.executable, "-m", "benchmarks.harness.turn", module, contender, json.dumps(turn._as_json())]
        _run([*command, str(answer)], os.environ | {"TMPDIR": str(folder)})
        values: dict[str, float | list[float]] = json.loads(answer.read_text())
        return {key: value if isinstance(value, list) else [value] for key, value in values.items()}


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """A folder on storage and one in shared memory, which are gone afterwards, with what jobs have left beside them."""
    folder, shm = (Path(tempfile.mkdtemp(dir=at, prefix=".bench-")) for at in (ROOT, "/dev/shm"))
    try:
        yield folder, shm
    finally:
        _end_all(folder)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)
        for left in shm.parent.glob(f"*{shm.name}.*"):  # telemetry of an agent that was killed
            left.unlink(missing_ok=True)


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Run a command to its end; what it printed is shown if it fails."""
    with tempfile.TemporaryFile(mode="w+") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(LIMIT)
        finally:
            # Also after its end: a contender may have left processes of its session behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{output.read()[-4000:]}")


def _end_all(folder: Path) -> None:
    """End what was started in a turn, which has the turn's folder in its environment, in whatever session it is."""
    end = time.monotonic() + PATIENCE
    while (found := _started_in(folder)) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # and once more: one that was killed may have started another before


def _started_in(folder: Path) -> list[int]:
    found = []
    for pid in psutil.pids():
        with suppress(OSError):
            if str(folder).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def main() -> None:
    """Do the work of a turn, or of a worker of a job that a turn has started."""
    if JOB in os.environ:
        job = json.loads(os.environ[JOB])
        function = getattr(importlib.import_module(job["module"]), job["function"])
        function(Turn.from_json(job["turn"]), *job["arguments"])
        return
    parser = argparse.ArgumentParser()
    for name in ("module", "contender", "turn", "answer"):
        parser.add_argument(name)
    options = parser.parse_args()
    benchmark = importlib.import_module(options.module).BENCHMARK
    contender = next(each for each in benchmark.contenders if each.name == options.contender)
    values = contender.measure(Turn.from_json(json.loads(options.turn)))
    Path(options.answer).write_text(json.dumps(dict(values)))


if __name__ == "__main__":
    main()
