"""Standstill of a job whose worker is killed, beside torchrun, DLRover, ft_launcher and the copy that nobody can save.

    python benchmarks/restart.py [--sizes tiny 0.5 1.5] [--contenders torchrun exec preload dlrover] [--kills 5]
                                 [--dlrover VENV] [--nvrx FOLDER] [--picture docs/images/restart.png]

The example's GPT-2 under DDP on two workers; one of them is killed with SIGKILL at a random instant. Measured is the
time from there to the end of the first step of the resumed job on all ranks; an attempt to restart that fails counts.
Every loss is compared, bit by bit, with that of a run that nothing befell.

DLRover needs a virtual environment of its own (torch 2.13.0, dlrover[torch]==0.6.1, grpcio, kubernetes, tornado,
protobuf); without one it is left out. ft_launcher, of NVIDIA's resiliency extension, comes from a folder:
`pip install --no-deps --target FOLDER nvidia-resiliency-ext==0.4.1 nvidia-ml-py defusedxml`. Its checkpoints need CUDA,
so the script under it saves by torch.save.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
NVRX = "nvidia_resiliency_ext"
WORKERS = 2
PATIENCE = 120.0
"""Seconds for a job to start, or to end."""
COMEBACK = 40.0
"""Seconds for a job to come back; one that does not is lost, and another is started."""
LEAST_STEPS = 4
"""Steps between a resume and the next kill."""
AGENT = ("notice", "stop", "rendezvous", "failed attempts")
WORKER = ("start process", "imports", "process group", "load", "model", "first step")
STAGES = (*AGENT, *WORKER)
Line = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """A launcher and what keeps the state under it."""

    name: str
    python: str
    saver: str
    launcher: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    script: tuple[str, ...] = ()


def contenders(dlrover: Path, nvrx: Path) -> dict[str, Contender]:
    """Return the contenders by key; each also as ``KEY-usual``, with a script that builds the model as most do."""
    known = launchers(dlrover, nvrx)
    usual = {
        f"{key}-usual": replace(one, name=f"{one.name}, usual script", script=("--usual",))
        for key, one in known.items()
    }
    return known | usual


def launchers(dlrover: Path, nvrx: Path) -> dict[str, Contender]:
    ours, shape = ("fastckpt_run", "--standalone"), (f"--nproc-per-node={WORKERS}", "--max-restarts=40")
    return {
        "torchrun": Contender("torchrun, torch.save", sys.executable, "torch",
                              ("torch.distributed.run", "--standalone", *shape),
                              {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        "plain": Contender("torchrun as it is", sys.executable, "torch",
                           ("torch.distributed.run", "--standalone", *shape)),
        "exec": Contender("fastckpt-run, no preload", sys.executable, "fastckpt",
                          (*ours, *shape), {"FASTCKPT_PRELOAD": "off"}),
        "preload": Contender("fastckpt-run", sys.executable, "fastckpt",
                             (*ours, *shape), {"FASTCKPT_PRELOAD": "auto"}),
        "noflush": Contender("fastckpt-run, no flush", sys.executable, "fastckpt",
                             (*ours, *shape), {"FASTCKPT_PRELOAD": "auto", "FASTCKPT_FLUSH": "0"}),
        "dlrover": Contender("dlrover-run 0.6.1", str(dlrover / "bin/python"), "dlrover",
                             ("dlrover.trainer.torch.elastic_run", "--standalone", "--max_restarts=40",
                              "--save-at-breakpoint", f"--nproc_per_node={WORKERS}")),
        "nvrx": Contender("ft_launcher 0.4.1", sys.executable, "torch",
                          (f"{NVRX}.fault_tolerance.launcher", "--standalone", *shape,
                           "--ignore-missing-fault-tol-cfg"),
                          {"PYTHONPATH": f"{HERE.parent}:{nvrx}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    }  # fmt: skip


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
    """A job under a contender's launcher, in a folder of its own."""

    def __init__(self, contender: Contender, size: str, folder: Path, shm: Path) -> None:
        self.contender, self.size, self.folder, self._shm = contender, size, folder, shm

    def _environment(self) -> dict[str, str]:
        binaries = str(Path(self.contender.python).parent)
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), "FASTCKPT_SHM_DIR": str(self._shm)}
        paths = {"PYTHONPATH": str(HERE.parent), "PATH": f"{binaries}:{os.environ['PATH']}"}
        return os.environ | own | paths | self.contender.environment

    @contextlib.contextmanager
    def started(self, *script: str) -> Iterator[subprocess.Popen[bytes]]:
        """Its launcher, which is ended with all that it started."""
        self.folder.mkdir(parents=True)
        launch = [str(HERE / "restart_launch.py"), str(self.folder / "launcher"), *self.contender.launcher]
        train = [str(HERE / "restart_train.py"), "--saver", self.contender.saver, "--size", self.size]
        train += self.contender.script
        with (self.folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [self.contender.python, *launch, *train, "--out", str(self.folder), *script],
                stdout=output, stderr=output, start_new_session=True, env=self._environment(),
            )  # fmt: skip
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


def restarts(job: Job, kills: int, rest: float = 0.0) -> list[Restart | None]:
    """Restart one job so many times, and let it end well; returns None for the restart that lost it.

    ``rest`` are seconds of training before the first: then what launchers do in the background of a start is done.
    """
    found, since = list[Restart | None](), 0.0
    with job.started() as process:
        for turn in range(kills):
            try:
                pids = job.wait_for(lambda since=since: job.ready(since), process, PATIENCE)
                time.sleep(0.0 if turn else rest)
                time.sleep(random.uniform(0.0, job.period()))
                since = time.monotonic()
                found.append(restart := kill_one(job, process, pids, turn % WORKERS))
            except LostError as error:
                say(f"  {job.contender.name}, {job.size}: did not come, or come back\n{error}")
                return [*found, None]
            say(f"  {job.contender.name}, {job.size}: {restart.seconds:.3f} s, from step {restart.step}")
        (job.folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def losses(job: Job) -> dict[int, set[str]]:
    """All losses of each step: several, if it was done several times and not alike."""
    found: dict[int, set[str]] = {}
    for line in job.lines():
        if line["what"] == "step":
            found.setdefault(line["step"], set()).add(line["loss"])
    return found


def wrong_losses(jobs: list[Job], reference: Job) -> list[str]:
    """Steps whose losses are not those of a run that nothing befell; empty for each job that is right."""
    last = max((step for job in jobs for step in losses(job)), default=1)
    with reference.started("--steps", str(last)) as process:
        process.wait(PATIENCE)
    right = losses(reference)
    return [
        f"{job.contender.name}, {job.size}: step {step}"
        for job in jobs
        for step, values in losses(job).items()
        if values != right.get(step)
    ]


# --- the limit: each worker copies the state once into memory that it has not touched


def copy_fresh(size: str, repeats: int) -> None:
    """Print how long it takes to copy a state of this size, tensor by tensor, out of warm shared memory."""
    import torch

    from benchmarks.restart_train import SHAPES
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
            print(json.dumps([time.perf_counter() - start, 4 * sum(sizes)]), flush=True)
            del copies


def limit(size: str, repeats: int) -> tuple[list[float], float]:
    """Seconds for all workers to copy the state at once, and its bytes."""
    command = [sys.executable, str(HERE / "restart.py"), "--copy", size, "--kills", str(repeats)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    workers = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(WORKERS)
    ]
    found, total = [], 0.0
    for _ in range(repeats):
        for worker in workers:
            worker.stdin.write("\n")  # type: ignore[union-attr]
            worker.stdin.flush()  # type: ignore[union-attr]
        answers = [json.loads(worker.stdout.readline()) for worker in workers]  # type: ignore[union-attr]
        found.append(max(seconds for seconds, _ in answers))
        total = answers[0][1]
    for worker in workers:
        worker.communicate()
    return found, total


# --- what is shown


def summary(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})"


@dataclass
class Result:
    """The restarts of one contender at one size."""

    contender: Contender
    size: str
    restarts: list[Restart]
    lost: int = 0

    @property
    def seconds(self) -> list[float]:
        return [restart.seconds for restart in self.restarts]

    def stage(self, name: str) -> float:
        return statistics.median([restart.stages[name] for restart in self.restarts] or [0.0])


def print_totals(results: list[Result], limits: dict[str, tuple[list[float], float]]) -> None:
    print("\n| size | launcher | kill to first step, s | in the first attempt | later | never | from step 0 |")
    print("| --- " * 7 + "|")
    for result in results:
        at_once = len(result.restarts) - sum(1 for restart in result.restarts if restart.stages["failed attempts"])
        afresh = sum(1 for restart in result.restarts if restart.step == 0)
        print(f"| {result.size} | {result.contender.name} | {summary(result.seconds)} | {at_once} "
              f"| {len(result.restarts) - at_once} | {result.lost} | {afresh} |")  # fmt: skip
    for size, (seconds, total) in limits.items():
        print(f"| {size} | limit: {WORKERS} workers copy {total / 1e9:.2f} GB each into fresh memory "
              f"| {summary(seconds)} | | | | |")  # fmt: skip
    print("\n| size | launcher | " + " | ".join(STAGES) + " |\n" + "| --- " * (len(STAGES) + 2) + "|")
    for result in results:
        stages = " | ".join(f"{result.stage(name):.3f}" for name in STAGES)
        print(f"| {result.size} | {result.contender.name} | {stages} |")


def draw(results: list[Result], path: Path) -> None:
    """Bars of the stages' medians, a panel for each size."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(result.size for result in results))
    figure, panels = pyplot.subplots(len(sizes), 1, figsize=(9, 1.1 + 1.5 * len(sizes)), squeeze=False)
    colours = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for panel, size in zip(panels[:, 0], sizes, strict=True):
        shown = [result for result in results if result.size == size][::-1]
        left = [0.0] * len(shown)
        for colour, name in zip(colours, STAGES, strict=True):
            widths = [result.stage(name) for result in shown]
            panel.barh([result.contender.name for result in shown], widths, left=left, color=colour, label=name)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, end in enumerate(left):
            panel.text(end, row, f" {end:.2f} s", va="center", fontsize=8)
        panel.set_xlim(0, 1.12 * max(left))
        panel.set_title("tiny" if size == "tiny" else f"{size} GB", fontsize=10, loc="left")
        panel.tick_params(labelsize=8)
    panels[-1, 0].set_xlabel("seconds from SIGKILL of a worker to the first step of the resumed job", fontsize=9)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / figure.get_figheight()))
    figure.savefig(path, dpi=90)


def measure(options: argparse.Namespace, folder: Path, shm: Path) -> tuple[list[Result], list[str]]:
    results, wrong = list[Result](), list[str]()
    known, others = contenders(options.dlrover, options.nvrx), set(Path("/dev/shm").iterdir())
    for size in options.sizes:
        jobs = list[Job]()
        for key in options.contenders:
            if not Path(known[key].python).exists():
                say(f"{known[key].name} is left out: there is no {known[key].python}")
                continue
            result, number = Result(known[key], size, []), 0
            while (left := options.kills - len(result.restarts) - result.lost) > 0:
                jobs.append(Job(known[key], size, folder / f"{key}-{size}-{(number := number + 1)}", shm))
                found = restarts(jobs[-1], left)
                result.restarts += [stages for stages in found if stages]
                result.lost += found.count(None)
                shutil.rmtree(jobs[-1].folder / "checkpoints", ignore_errors=True)
                if known[key].saver == "dlrover":
                    forget("_ckpt_shm_", others)  # it leaves them at every end of a job
            results.append(result)
        nobody = Contender("no faults", sys.executable, "none", known["torchrun"].launcher)
        wrong += wrong_losses(jobs, Job(nobody, size, folder / f"reference-{size}", shm))
    return results, wrong


def forget(name: str, others: Collection[Path] = ()) -> None:
    """Remove files of this name from shared memory, but for those of others."""
    for path in set(Path("/dev/shm").glob(f"*{name}*")).difference(others):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "0.5", "1.5"], choices=("tiny", "0.5", "1.5"))
    parser.add_argument("--contenders", nargs="+", default=["torchrun", "exec", "preload", "dlrover"],
                        choices=contenders(Path(), Path()).keys())  # fmt: skip
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--dlrover", type=Path, default=Path(".venv-dlrover"), help="virtual environment of DLRover")
    parser.add_argument("--nvrx", type=Path, default=Path(".nvrx"), help="folder with nvidia-resiliency-ext")
    parser.add_argument("--picture", type=Path, help="file for the bars")
    parser.add_argument("--keep", type=Path, help="folder for what the jobs write; default: one that is removed")
    parser.add_argument("--copy", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    if options.copy:
        copy_fresh(options.copy, options.kills)
        return 0
    options.dlrover, options.nvrx = options.dlrover.absolute(), options.nvrx.absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # jobs are ended with this process
    limits = {size: limit(size, options.kills) for size in options.sizes}
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix=".bench-")))
        shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fastckpt-bench-"))
        stack.callback(forget, shm.name)
        results, wrong = measure(options, folder.absolute(), shm)
    print_totals(results, limits)
    print("\nlosses: " + (f"WRONG: {'; '.join(wrong)}" if wrong else "bitwise those of a run without faults, all"))
    if options.picture:
        draw(results, options.picture)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
