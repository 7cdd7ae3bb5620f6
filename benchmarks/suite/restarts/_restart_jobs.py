"""Jobs of two workers under a launcher, killed again and again: each restart stage by stage, and its limit."""

import contextlib
import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.results import ROOT
from benchmarks.suite import _peers

WORKERS = 2
PATIENCE = 120.0
"""Seconds for a job to start, or to end."""
COMEBACK = 40.0
"""Seconds for a job to come back."""
LEAST_STEPS = 4
"""Steps between a resume and the next kill."""
AGENT = ("notice", "stop", "rendezvous", "failed attempts")
WORKER = ("start process", "imports", "process group", "load", "model", "first step")
STAGES = (*AGENT, *WORKER)
SHAPE = (f"--nproc-per-node={WORKERS}", "--max-restarts=40")
TORCHRUN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it one of four kills of torchrun's workers is not survived."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Launcher:
    """A launcher, and what keeps the state under it.

    Args:
        module: Of its command.
        saver: Of _restart_train.
        options: Of the launcher.
        environment: Variables in addition.
        peer: The environment that it is in, if not that of the project.
    """

    module: str
    saver: str
    options: tuple[str, ...] = SHAPE
    environment: dict[str, str] = field(default_factory=dict)
    peer: str = ""

    @property
    def python(self) -> str:
        """The interpreter that runs it."""
        return str(_peers.python_of(self.peer)) if self.peer else sys.executable


LAUNCHERS = {
    "fastckpt": Launcher("fastckpt_run", "fastckpt", environment={"FASTCKPT_PRELOAD": "auto"}),
    "fastckpt, no preload": Launcher("fastckpt_run", "fastckpt", environment={"FASTCKPT_PRELOAD": "off"}),
    "torchrun": Launcher("torch.distributed.run", "torch", environment=TORCHRUN),
    "dlrover-run": Launcher(
        "dlrover.trainer.torch.elastic_run",
        "dlrover",
        ("--max_restarts=40", "--save-at-breakpoint", f"--nproc_per_node={WORKERS}"),
        peer="dlrover",
    ),
    # Its checkpoints need CUDA: the script under it saves by torch.save.
    "ft_launcher": Launcher(
        "nvidia_resiliency_ext.fault_tolerance.launcher",
        "torch",
        (*SHAPE, "--ignore-missing-fault-tol-cfg"),
        TORCHRUN,
        peer="nvrx",
    ),
}


@dataclass(frozen=True)
class Restart:
    """The seconds that each stage took, and the step that was loaded."""

    stages: dict[str, float]
    step: int

    @property
    def seconds(self) -> float:
        """Seconds from the kill to the end of the first step."""
        return sum(self.stages.values())


class LostError(Exception):
    """A job has not come so far in time."""


class Job:
    """A job under a launcher, in a folder of its own.

    Args:
        launcher: Of it.
        size: Of _restart_train.
        folder: A directory that is not there yet.
        shm: For fastckpt's arena.
        script: More arguments of the script.
    """

    def __init__(self, launcher: Launcher, size: str, folder: Path, shm: Path, *script: str) -> None:
        self.launcher, self.size, self.folder = launcher, size, folder
        self._shm, self._script = shm, script

    def _environment(self) -> dict[str, str]:
        binaries = str(Path(self.launcher.python).parent)
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), "FASTCKPT_SHM_DIR": str(self._shm)}
        paths = {"PYTHONPATH": str(ROOT), "PATH": f"{binaries}:{os.environ['PATH']}"}
        return os.environ | own | paths | self.launcher.environment

    @contextlib.contextmanager
    def started(self, *script: str) -> Iterator[subprocess.Popen[bytes]]:
        """Its launcher, which is ended with all that it started."""
        self.folder.mkdir(parents=True)
        here = Path(__file__)
        command = [self.launcher.python, str(here.with_name("_restart_launch.py")), str(self.folder / "launcher")]
        command += [self.launcher.module, "--standalone", *self.launcher.options]
        command += [str(here.with_name("_restart_train.py")), "--saver", self.launcher.saver, "--size", self.size]
        command += ["--out", str(self.folder), *self._script, *script]
        with (self.folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env=self._environment()
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                process.kill()
                process.wait()

    def lines(self) -> list[Line]:
        """All that the workers stamped, in the order of time."""
        found: list[Line] = []
        for path in self.folder.glob("stamps.*"):
            found += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return sorted(found, key=lambda line: line["at"])

    def launcher_stamp(self, what: str, after: float, which: Callable[..., Any] = min) -> float:
        lines = [json.loads(line) for line in (self.folder / "launcher").read_text().splitlines()]
        return float(which([line["at"] for line in lines if line["what"] == what and line["at"] > after], default=0.0))

    def pids(self, after: float) -> dict[int, int]:
        """The newest process of each rank that has begun since then."""
        return {line["rank"]: line["pid"] for line in self.lines() if line["what"] == "script" and line["at"] > after}

    def wait_for(self, condition: Callable[[], Any], process: subprocess.Popen[bytes], seconds: float) -> Any:
        """Wait until a condition is true; raises LostError if the job ends first, or the time is over."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            if process.poll() is not None or time.monotonic() > end:
                raise LostError((self.folder / "output").read_text(errors="replace")[-2000:])
            time.sleep(0.005)
        return found

    def period(self) -> float:
        """Seconds from one save to the next: an instant drawn from them is in a save as often as any other."""
        steps = [line["at"] for line in self.lines() if line["what"] == "step" and line["rank"] == 0]
        return float(steps[-1] - steps[-3])

    def ready(self, after: float) -> dict[int, int] | None:
        """The workers, once both have done enough steps and a state of theirs is kept."""
        lines, pids = self.lines(), self.pids(after)
        for pid in pids.values():
            done = [line["what"] for line in lines if line["pid"] == pid]
            if done.count("step") < LEAST_STEPS or "saved" not in done:
                return None
        return pids if len(pids) == WORKERS else None


def stepped(job: Job, after: float) -> dict[int, int] | None:
    """The workers of all ranks, once each has done a step of the resumed job."""
    lines = [line for line in job.lines() if line["at"] > after]
    pids = job.pids(after)
    steps = {line["rank"] for line in lines if line["what"] == "step" and line["pid"] == pids.get(line["rank"])}
    return pids if len(steps) == WORKERS else None


def kill_one(job: Job, process: subprocess.Popen[bytes], pids: dict[int, int], rank: int) -> Restart:
    """SIGKILL of a rank, and what came of it."""
    watched = {pid: os.pidfd_open(pid) for pid in pids.values()}
    killed = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    for fd in watched.values():
        select.select([fd], [], [], PATIENCE)
        os.close(fd)
    stopped = time.monotonic()
    now = job.wait_for(lambda: stepped(job, killed), process, COMEBACK)
    ends = [min(job.launcher_stamp("noticed", killed), stopped), stopped, job.launcher_stamp("rendezvous", killed)]
    ends.append(job.launcher_stamp("rendezvous", killed, max))
    mine = [line for line in job.lines() if line["pid"] in now.values()]
    for what in ("script", "imports", "group", "load", "model", "step"):
        ends.append(max(min(l["at"] for l in mine if l["what"] == what and l["rank"] == r) for r in now))  # noqa: E741
    stages = dict(zip(STAGES, (b - a for a, b in zip([killed, *ends], ends, strict=False)), strict=True))
    return Restart(stages, min(line["step"] for line in mine if line["what"] == "load"))


def restarts(job: Job, kills: int, rest: float = 0.0) -> list[Restart]:
    """Restart one job so many times, and let it end well; raises LostError if it does not come back.

    ``rest`` are seconds of training before the first: then what launchers do in the background of a start is done.
    """
    found, since = list[Restart](), 0.0
    with job.started() as process:
        for turn in range(kills):
            pids = job.wait_for(lambda since=since: job.ready(since), process, PATIENCE)
            time.sleep(0.0 if turn else rest)
            time.sleep(random.uniform(0.0, job.period()))
            since = time.monotonic()
            found.append(kill_one(job, process, pids, turn % WORKERS))
        (job.folder / "stop").touch()
        process.wait(PATIENCE)
    check_losses(job)
    return found


def check_losses(job: Job) -> None:
    """Raise RuntimeError if a step that was done several times had several losses."""
    found: dict[int, set[str]] = {}
    for line in job.lines():
        if line["what"] == "step":
            found.setdefault(line["step"], set()).add(line["loss"])
    if wrong := [step for step, values in found.items() if len(values) > 1]:
        raise RuntimeError(f"losses differ when steps are done again: {wrong}")


# --- the limit: each worker copies the state once into memory that it has not touched


COPY = "from benchmarks.suite.restarts._restart_jobs import copy_fresh; copy_fresh({!r}, {})"


def copy_fresh(size: str, repeats: int) -> None:
    """Print how long it takes to copy a state of this size, tensor by tensor, out of warm shared memory."""
    import torch

    from benchmarks.suite.restarts._restart_train import SHAPES
    from examples.gpt2.model import GPT, GPTConfig

    torch.set_num_threads(1)
    with torch.device("meta"):
        sizes = [p.numel() for p in GPT(GPTConfig(**SHAPES[size])).parameters() for _ in range(3)]
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(4 * sum(sizes))
        memory = mmap.mmap(file.fileno(), 4 * sum(sizes), mmap.MAP_SHARED | mmap.MAP_POPULATE)
        sources = torch.frombuffer(memory, dtype=torch.float32).split(sizes)
        for _ in range(repeats):
            sys.stdin.readline()
            start = time.perf_counter()
            copies = [torch.empty_like(source).copy_(source) for source in sources]
            print(time.perf_counter() - start, flush=True)
            del copies


def limit(size: str, repeats: int) -> list[float]:
    """Seconds for all workers to copy the state at once."""
    command = [sys.executable, "-c", COPY.format(size, repeats)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes) for _ in range(WORKERS)]
    found = []
    for _ in range(repeats):
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        found.append(max(float(worker.stdout.readline()) for worker in workers))
    for worker in workers:
        worker.communicate()
    return found
