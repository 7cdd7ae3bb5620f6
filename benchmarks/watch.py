"""Measures the watching of a job: all of it on against all of it off, by turns, with the confidence of the difference.

    python benchmarks/watch.py [--workers 2 8] [--pairs 10] [--steps 400] [--width 256] [--layers 8]

On: the slow rank is looked for, metrics are served and scraped each second, the live page is polled every 2 s as an
open browser does, TensorBoard files are written. Off: ``--fast-no-slow-ranks``, and none of the others. Each pair of
jobs runs on and off, in alternating order. Times are of rank 0: the median of its steps, and its processor time for
each. Ratios are geometric means over pairs, with 95% intervals by Student's t on their logarithms. The agent's share of
a core is its processor time from its workers' first step to their last, and what a scrape takes is as seen by a reader.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).parent
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
"""Student's t at 95%, by degrees of freedom from 1; beyond, that of the last."""
URL = re.compile(r"http://[0-9.]+:\d+")
PATIENCE = 600.0


@dataclass
class Run:
    """Times of one job: the median of its steps, processor seconds of rank 0 per step, of the agent per second."""

    step: float
    cpu: float
    agent: float
    scrapes: list[float] = field(default_factory=list)


class Reader:
    """Scrapes and polls as soon as the job says where, in a thread."""

    def __init__(self, output: Path) -> None:
        self._output, self._ends = output, threading.Event()
        self.scrapes: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while not self._ends.wait(1.0):
            url = URL.search(self._output.read_text(errors="replace"))
            if url is None:
                continue
            turn += 1
            begin = time.perf_counter()
            try:
                with urllib.request.urlopen(f"{url[0]}/metrics", timeout=10) as answer:
                    answer.read()
                self.scrapes.append(time.perf_counter() - begin)
                if turn % 2:
                    with urllib.request.urlopen(f"{url[0]}/", timeout=10) as answer:
                        answer.read()
            except (urllib.error.URLError, ConnectionError):
                pass  # it has ended


def run(args: argparse.Namespace, workers: int, folder: Path, *, watched: bool) -> Run:
    """Run a job to its end."""
    options = ["--fast-metrics-port=0", f"--fast-tensorboard={folder / 'board'}"] if watched else []
    options += [] if watched else ["--fast-no-slow-ranks"]
    script = [str(HERE / "watch_train.py"), "--out", str(folder), "--steps", str(args.steps)]
    script += ["--width", str(args.width), "--layers", str(args.layers)]
    command = [sys.executable, "-m", "fastckpt_run", "--standalone", f"--nproc-per-node={workers}", *options, *script]
    own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "PYTHONPATH": str(HERE.parent)}
    output = folder / "output"
    with output.open("wb") as stream:
        job = subprocess.Popen(command, stdout=stream, stderr=stream, env=os.environ | own)
    agent, samples = psutil.Process(job.pid), list[tuple[float, float]]()
    reader = Reader(output) if watched else None
    try:
        end = time.monotonic() + PATIENCE
        while job.poll() is None and time.monotonic() < end:
            times = agent.cpu_times()
            samples.append((time.monotonic(), times.user + times.system))
            time.sleep(0.25)
        job.wait(1.0)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        job.wait(10.0)
    finally:
        if reader is not None:
            reader.close()
    found = folder / "times.json"
    if job.returncode or not found.exists():
        raise SystemExit(output.read_text(errors="replace"))
    took = json.loads(found.read_text())
    # The last seconds before the end, in which the workers trained: the steps themselves say for how long.
    begin = samples[-1][0] - 0.8 * min(sum(took["steps"]), samples[-1][0] - samples[0][0])
    inner = [sample for sample in samples if sample[0] >= begin] or samples
    share = (inner[-1][1] - inner[0][1]) / max(1e-9, inner[-1][0] - inner[0][0])
    scrapes = reader.scrapes if reader else []
    return Run(statistics.median(took["steps"]), took["cpu"] / len(took["steps"]), share, scrapes)


def interval(ratios: list[float]) -> str:
    """A geometric mean with its 95% interval, as percent more than 1."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    if len(logs) < 2:
        return f"{100 * math.expm1(mean):+.2f}%"
    half = STUDENT[min(len(logs) - 2, len(STUDENT) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = (100 * math.expm1(mean + sign * half) for sign in (-1, 1))
    return f"{100 * math.expm1(mean):+.2f}% ({low:+.2f} to {high:+.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    print("| workers | step, off | step, on | processor time of a step, on | agent, off | agent, on | a scrape |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for workers in args.workers:
        pairs = list[tuple[Run, Run]]()
        for turn in range(args.pairs):
            found = dict[bool, Run]()
            for watched in (bool(turn % 2), not turn % 2):
                with tempfile.TemporaryDirectory() as folder:
                    found[watched] = run(args, workers, Path(folder), watched=watched)
            pairs.append((found[False], found[True]))
        scrapes = [taken for _, on in pairs for taken in on.scrapes]
        cells = [
            f"{workers}",
            f"{1e3 * statistics.median(off.step for off, _ in pairs):.2f} ms",
            interval([on.step / off.step for off, on in pairs]),
            interval([on.cpu / off.cpu for off, on in pairs]),
            f"{100 * statistics.mean(off.agent for off, _ in pairs):.2f}% of a core",
            f"{100 * statistics.mean(on.agent for _, on in pairs):.2f}%",
            f"{1e3 * statistics.median(scrapes):.1f} ms" if scrapes else "-",
        ]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
