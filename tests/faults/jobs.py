"""Jobs of the training under faults: start one, wait for what it does, compare it with one that nothing befell."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastckpt._core.memory.arena import arena_path
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.faults import Fault, to_text
from tests.support import launchers
from tests.support.json_lines import whole_lines
from tests.support.live_folders import remove_live

HERE = Path(__file__).parent
DEADLINE = 240.0


def launcher_for(folder: Path) -> tuple[str, str]:
    """What has Python run fastckpt-run, with the faults that are in a folder; its arguments follow."""
    return str(HERE / "launch.py"), str(folder)


def run_forked(
    folder: Path,
    *arguments: object,
    seconds: float = DEADLINE,
    preload: str = "auto",
    code: int = 0,
    **environment: str,
) -> str:
    """Have a fork run fastckpt-run, its workers forks as well, and see the code of its end; all that they wrote.

    It takes the fixture `forked_launchers`; without, the launcher is executed.
    """
    variables = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "FASTCKPT_PRELOAD": preload} | environment
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"output-{time.monotonic_ns()}"
    with output.open("wb") as file:
        command = [*launcher_for(folder), *map(str, arguments)]
        process = launchers.start(command, variables, file.fileno())
    try:
        ended = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    text = output.read_text(errors="replace")
    assert ended == code, text
    return text


class Job:
    """One launch, or several in a row, of train.py in a folder."""

    def __init__(self, folder: Path, checkpoint_dir: Path | None = None) -> None:
        self.folder = folder
        self.checkpoint_dir = checkpoint_dir or folder / "checkpoints"
        self.faults: list[Fault] = []
        self.output = folder / "output"
        self.events = folder / "events"
        self.process: subprocess.Popen[bytes] | None = None
        self.launches = 0
        self.deadline = DEADLINE
        folder.mkdir(parents=True, exist_ok=True)

    def with_faults(self, *faults: Fault) -> "Job":
        self.faults += faults
        return self

    def start(
        self,
        *script: str,
        ranks: int = 2,
        launcher: tuple[str, ...] = (),
        restarts: int | None = None,
        program: str = "train.py",
        **environment: str,
    ) -> "Job":
        (self.folder / "faults").write_text(to_text(self.faults))
        self.launches += 1
        restarts = len(self.faults) + 2 if restarts is None else restarts
        shape = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
        arguments = ["--out", str(self.folder), "--checkpoint-dir", str(self.checkpoint_dir), *script]
        command = [*(launcher or (*launcher_for(self.folder), *shape)), str(HERE / program), *arguments]
        with self.output.open("ab") as output:
            self.process = launchers.start(command, os.environ | self._environment() | environment, output.fileno())
        return self

    def _environment(self) -> dict[str, str]:
        # torchrun leaves its logs in TMPDIR
        mine = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        mine |= {"FASTCKPT_EVENTS": str(self.events)}
        # Faults may hit many starts in a row before their first step: that is no reason to give up here.
        mine |= {"FAULTS_LAUNCH": str(self.launches), "FASTCKPT_MAX_STALLS": "0"}
        # Where workers start often, forked ones spare each start its imports; elsewhere they are executed.
        return mine | {"FASTCKPT_PRELOAD": "auto"}

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        assert self.process is not None
        return self.process.wait(self.deadline + 20 * len(self.faults))

    def run(self, *script: str, **options: Any) -> "Job":
        """Start, and wait for its good end."""
        code = self.start(*script, **options).wait()
        assert code == 0, f"exit code {code}:\n{self.text()}"
        return self

    def persisted(self, step: int) -> bool:
        """Whether the agent itself holds it durable: what was renamed, but not yet synced, can be read already."""
        return any(line["event"] == "persisted" and line["step"] == step for line in whole_lines(self.events))

    def go_on(self, step: int) -> None:
        """Let those that wait at a step go on."""
        (self.folder / f"go.{step}").touch()

    def wait_for_all(self, step: int) -> None:
        """Wait until both ranks wait at a step."""
        for rank in (0, 1):
            self.wait_for("waiting", step, rank)

    def run_to_the_end(self, *script: str, of: int = signal.SIGKILL, **options: Any) -> "Job":
        """Launch it again whenever its agent dies of a signal, until its good end."""
        code = -of
        while code == -of and self.launches <= len(self.faults):
            code = self.start(*script, **options).wait()
        assert code == 0, f"exit code {code} of launch {self.launches}:\n{self.text()}"
        return self

    def kill_processes(self, *victims: str | int) -> None:
        """SIGKILL of "agent" or ranks, from outside, whatever they do now."""
        assert self.process is not None
        for pid in [self.process.pid if victim == "agent" else self.pid(int(victim)) for victim in victims]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def send(self, number: int) -> None:
        """A signal to the agent."""
        assert self.process is not None
        self.process.send_signal(number)

    def lose_memory(self) -> None:
        """All that a dead job has in memory is lost, as with its host."""
        remove_live(self.arena())

    def end(self) -> None:
        """Clean up after a test that failed."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    # --- what it did

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def log(self, rank: int) -> list[dict[str, Any]]:
        """The lines that a rank has written whole; it may be writing one more."""
        return whole_lines(self.folder / f"log.{rank}")

    def ranks(self) -> list[int]:
        return sorted(int(path.suffix[1:]) for path in self.folder.glob("log.*"))

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid.{rank}").read_text())

    def wait_for(self, what: str, value: int, rank: int = 0) -> None:
        """Wait until a rank has logged ``what=value``."""
        self.until(lambda: any(line.get(what) == value for line in self.log(rank)), f"{what}={value} of rank {rank}")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end, has_ended = time.monotonic() + DEADLINE, False
        while not condition():
            assert not has_ended, f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < end, f"{what} did not come true in {DEADLINE} s:\n{self.text()}"
            has_ended = self.process is not None and self.process.poll() is not None
            time.sleep(0.01)

    def injected(self) -> int:
        return len(list(self.folder.glob("injected.*")))

    def resumes(self, rank: int = 0) -> list[tuple[int, str]]:
        """Step and tier of each start of a rank."""
        return [(line["loaded"], line["tier"]) for line in self.log(rank) if "loaded" in line]

    def losses(self, rank: int) -> dict[int, set[str]]:
        """All losses of each step, of which there are several if steps were repeated."""
        found: dict[int, set[str]] = {}
        for line in self.log(rank):
            if "loss" in line:
                found.setdefault(line["step"], set()).add(line["loss"])
        return found

    def ends(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(self.folder.glob("end.*"))}

    def starts(self) -> list[dict[int, list[dict[str, Any]]]]:
        """What each rank logged since each start, as far as it had come; the first line tells what was loaded."""
        found: dict[tuple[int, ...], dict[int, list[dict[str, Any]]]] = {}
        for rank in self.ranks():
            lines: list[dict[str, Any]] = []
            for line in self.log(rank):
                if "loaded" in line:
                    lines = found.setdefault(tuple(line["start"]), {}).setdefault(rank, [])
                lines.append(line)
        return [found[start] for start in sorted(found)]

    def repeated(self) -> list[tuple[int, int]]:
        """For each resume, the steps that were done again, and how many saves since were reported as skipped."""
        found = []
        for before, now in pairwise(self.starts()):
            loaded = _loaded(now)
            lines = [line for log in before.values() for line in log]
            done = max([line["step"] for line in lines if "loss" in line], default=loaded)
            skipped = {line["skipped"] for line in lines if line.get("skipped", 0) > loaded}
            found.append((max(0, done - loaded), len(skipped)))
        return found

    def arena(self) -> Path:
        return arena_path(os.environ["FASTCKPT_SHM_DIR"], os.path.realpath(self.checkpoint_dir), 0)

    def stored(self) -> list[int]:
        """The steps on storage, each read and found whole; newest first."""
        found = CheckpointDirectory(self.checkpoint_dir).checkpoints()
        for checkpoint in found:
            checkpoint.verify()
        return [checkpoint.id.step for checkpoint in found]

    def troubles(self) -> list[str]:
        return [line["trouble"] for rank in self.ranks() for line in self.log(rank) if "trouble" in line]

    def skips(self) -> set[int]:
        return {line["skipped"] for rank in self.ranks() for line in self.log(rank) if "skipped" in line}

    def newest_saved(self, start: int = -1) -> int:
        """The newest step of which every rank was told that it is saved; what it had loaded, if there is none."""
        starts, newest = self.starts(), 0
        for logs in starts[: start + 1 or None]:
            if len(logs) == len(self.ranks()):
                newest = min(max(line.get("saved", line.get("loaded", 0)) for line in log) for log in logs.values())
            else:
                newest = min(newest, _loaded(logs))  # a rank was killed before it could begin
        return newest


def _loaded(logs: dict[int, list[dict[str, Any]]]) -> int:
    return int(next(iter(logs.values()))[0]["loaded"])


def assert_as_if_nothing_had_happened(job: Job, reference: Job, interval: int = 2) -> None:
    """The very losses and weights of a run that nothing befell, and few steps repeated."""
    assert job.ends() == reference.ends(), job.text()
    for rank in reference.ranks():
        assert job.losses(rank) == reference.losses(rank), f"rank {rank}:\n{job.text()}"
    for i, logs in enumerate(job.starts()[1:]):
        step, tiers = _loaded(logs), {log[0]["tier"] for log in logs.values()}
        assert tiers != {"memory"} or step >= job.newest_saved(i), f"start {i + 1} at {step}:\n{job.text()}"
    for steps, skips in job.repeated():
        assert steps <= interval * (1 + skips), f"{job.repeated()}\n{job.text()}"


def assert_all_injected(job: Job) -> None:
    left = job.faults[job.injected() :]
    assert not left, f"not injected: {left}\n{job.text()}"
