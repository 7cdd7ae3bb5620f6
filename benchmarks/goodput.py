"""What part of its time a job makes use of while it is killed again and again: how often to save, and by what.

    python benchmarks/goodput.py [--means 10 20 60] [--seeds 10] [--seconds 300] [--parallel 2]
                                 [--contenders auto fixed-1 ... torch-50] [--step-seconds 0.5] [--megabytes 24]
    python benchmarks/goodput.py --contenders            # only the tables of what was measured before

Contenders: ``auto``, the three lines under fastckpt-run; ``fixed-N``, the same with a save to memory every N steps and
a persist every 10, or every N if that is more; ``torch-N``, torchrun, and ``torch.save`` with an atomic rename every N
steps. The worker is killed with SIGKILL at instants that are exponentially distributed, the same for all contenders of
a seed; time counts from the resume of the first start. At the end it is killed once more: the steps that it then
resumes from were of use. Goodput is their number, of those that fit into the time without saves or kills.

A run is added to ``--results`` when it has ended, and not repeated. Contenders that were not measured with all seeds
are shown with the number of theirs, and take no part in ratios: those are of the means over seeds, with 95% intervals
by the jackknife over seeds, so that what two contenders reach at the same instants of kills stays together. The best of
a kind is the best as measured, by the same seeds.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
STEPS = (1, 2, 5, 10, 20, 50)
CONTENDERS = ("auto", *(f"{kind}-{steps}" for kind in ("fixed", "torch") for steps in STEPS))
PATIENCE = 180.0
"""Seconds for a job to start, or to resume after the last kill."""
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
"""Student's t at 95%, by degrees of freedom from 1; beyond, that of the last."""
Line = dict[str, Any]


def instants(mean: float, seconds: float, seed: int) -> list[float]:
    """When to kill."""
    rng = random.Random(f"{mean} {seed}")
    found = [rng.expovariate(1 / mean)]
    while found[-1] < seconds:
        found.append(found[-1] + rng.expovariate(1 / mean))
    return found[:-1]


class Run:
    """A job of one contender in a folder of its own."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self._name, self._folder, self._options = name, folder, options
        folder.mkdir(parents=True)

    def command(self) -> list[str]:
        kind, _, every = self._name.partition("-")
        launcher = "torch.distributed.run" if kind == "torch" else "fastckpt_run"
        script = ["--saver", "torch" if kind == "torch" else "fastckpt", "--every", every or "0"]
        script += ["--step-seconds", str(self._options.step_seconds), "--megabytes", str(self._options.megabytes)]
        own = [str(HERE / "goodput_train.py"), "--out", str(self._folder), *script]
        return [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node=1", "--max-restarts=1000", *own]

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fastckpt-bench-"))
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder), "PYTHONPATH": str(HERE.parent)}
        own |= {"FASTCKPT_SHM_DIR": str(shm)}
        with (self._folder / "output").open("wb") as output:
            process = subprocess.Popen(
                self.command(), stdout=output, stderr=output, env=os.environ | own, start_new_session=True
            )
        try:
            yield process
        finally:
            self._end(process)
            for path in {shm, *Path("/dev/shm").glob(f"*{shm.name}*")}:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait()

    def stamps(self, what: str) -> list[Line]:
        path = self._folder / "stamps"
        text = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines = [json.loads(line) for line in text if line.endswith("\n")]
        return [line for line in lines if line["what"] == what]

    def resumed(self, process: subprocess.Popen[bytes], count: int) -> Line | None:
        """The resume of this number; None if the launcher has given up before."""
        end = time.monotonic() + PATIENCE
        while len(found := self.stamps("resumed")) < count:
            if process.poll() is not None:
                return None
            if time.monotonic() > end:
                raise SystemExit(f"{self._name} has not resumed:\n{(self._folder / 'output').read_text()[-3000:]}")
            time.sleep(0.1)
        return found[count - 1]

    def kill(self, process: subprocess.Popen[bytes]) -> bool:
        """Kill the worker, if there is one."""
        begun = self.stamps("script")
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            worker = psutil.Process(begun[-1]["pid"])
            if worker.status() != psutil.STATUS_ZOMBIE and process.pid in (each.pid for each in worker.parents()):
                worker.kill()
                return True
        return False

    def measure(self, kills: list[float]) -> Line:
        with self.started() as process:
            first = self.resumed(process, 1)
            if first is None:
                raise SystemExit((self._folder / "output").read_text()[-3000:])
            struck = 0
            for instant in kills:
                time.sleep(max(0.0, first["at"] + instant - time.monotonic()))
                struck += self.kill(process)
            time.sleep(max(0.0, first["at"] + self._options.seconds - time.monotonic()))
            done = len(self.stamps("resumed"))
            killed = self.kill(process)
            last = self.resumed(process, done + 1) if killed or process.poll() is None else None
            gave_up = last is None
            steps = [line["step"] for line in self.stamps("step")]
        resumes = self.stamps("resumed")
        useful = (last or resumes[-1])["step"]
        return {"useful": useful, "taken": len(steps), "kills": struck, "starts": len(resumes), "gave_up": gave_up}


def measure(folder: Path, name: str, mean: float, seed: int, options: argparse.Namespace) -> Line:
    """One run, as a line of the results."""
    kills = instants(mean, options.seconds, seed)
    load = os.getloadavg()[0]
    found = Run(name, folder, options).measure(kills)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    goodput = found["useful"] * options.step_seconds / options.seconds
    return key(name, mean, seed, options) | found | {"goodput": goodput, "load": load, "ended": time.time()}


def key(name: str, mean: float, seed: int, options: argparse.Namespace) -> Line:
    """What a run is known by."""
    shape = {"seconds": options.seconds, "step_seconds": options.step_seconds, "megabytes": options.megabytes}
    return {"contender": name, "mean": mean, "seed": seed, **shape}


def run_all(folder: Path, options: argparse.Namespace) -> None:
    """What was not measured yet, seed by seed; contenders of a seed in any order, as machines change meanwhile."""
    have = [{name: line[name] for name in key("", 0, 0, options)} for line in lines(options.results)]
    wanted = [
        (name, mean, seed)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for mean in options.means
        for name in random.Random(seed).sample(options.contenders, len(options.contenders))
        if key(name, mean, seed, options) not in have
    ]

    def one(name: str, mean: float, seed: int) -> None:
        result = measure(folder / f"{name}-{mean:g}-{seed}", name, mean, seed, options)
        with options.results.open("a") as results:
            results.write(json.dumps(result) + "\n")
        print(json.dumps(result), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        try:
            for done in [pool.submit(one, *each) for each in wanted]:
                done.result()
        except BaseException:  # also SIGTERM: those that run are ended by themselves, and no others begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ratio(ours: list[float], others: list[float]) -> str:
    """The ratio of the means, and its 95% interval by the jackknife over seeds, which keeps pairs together."""
    if not sum(others) or not sum(ours):
        return "-"
    whole, count = math.log(sum(ours) / sum(others)), len(ours)
    without = [(sum(ours) - a, sum(others) - b) for a, b in zip(ours, others, strict=True)]
    if count < 2 or any(not (a and b) for a, b in without):
        return f"{math.exp(whole):.2f}"
    parts = [count * whole - (count - 1) * math.log(a / b) for a, b in without]
    half = STUDENT[min(count - 2, len(STUDENT) - 1)] * statistics.stdev(parts) / math.sqrt(count)
    return f"{math.exp(whole):.2f} ({math.exp(whole - half):.2f}-{math.exp(whole + half):.2f})"


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def tables(options: argparse.Namespace) -> None:
    """Goodput by contender, and ratios to the best of each kind."""
    shape = key("", 0, 0, options).keys() - {"contender", "mean", "seed"}
    known = [line for line in lines(options.results) if all(line[name] == vars(options)[name] for name in shape)]
    row("mean between kills, s", "seeds", *CONTENDERS, "auto : best fixed", "auto : best torchrun")
    row(*["---"] * (len(CONTENDERS) + 4))
    for mean in sorted({line["mean"] for line in known}):
        found: dict[str, dict[int, float]] = {}
        for line in known:
            if line["mean"] == mean:
                found.setdefault(line["contender"], {})[line["seed"]] = line["goodput"]
        most = max(len(each) for each in found.values())
        running = {name: each for name, each in found.items() if len(each) == most}
        seeds = sorted(set.intersection(*(set(each) for each in running.values())))
        by = {name: [each[seed] for seed in seeds] for name, each in running.items()}
        cells = [cell(found[name], most) if name in found else "-" for name in CONTENDERS]
        row(f"{mean:g}", len(seeds), *cells, *(beside(by, kind) for kind in ("fixed", "torch")))


def cell(by_seed: dict[int, float], most: int) -> str:
    """A mean over seeds, and of how many, if that is fewer than others have."""
    few = f" ({len(by_seed)})" if len(by_seed) < most else ""
    return f"{statistics.fmean(by_seed.values()):.2f}{few}"


def beside(by: dict[str, list[float]], kind: str) -> str:
    """Auto beside the best of a kind."""
    others = {name: each for name, each in by.items() if name.startswith(kind)}
    if "auto" not in by or not others:
        return "-"
    best = max(others, key=lambda name: statistics.fmean(others[name]))
    return f"{ratio(by['auto'], others[best])} {best}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--means", nargs="+", type=float, default=[10.0, 20.0, 60.0], help="seconds between kills")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run, from its first resume")
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--megabytes", type=float, default=24.0, help="of the state")
    parser.add_argument("--parallel", type=int, default=2, help="runs at once")
    parser.add_argument("--results", type=Path, default=HERE.parent / ".bench-goodput.json", help="lines of JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=HERE.parent) as name:
        run_all(Path(name), options)
    tables(options)


if __name__ == "__main__":
    main()
