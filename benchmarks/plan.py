"""Compares `fastckpt plan` with what a job takes: arena, seconds of a persist, goodput.

    python benchmarks/plan.py [--kinds ddp fsdp table] [--seconds 60] [--mean 10] [--megabytes 36]

Each job runs twice with two workers, which are killed with SIGKILL at instants that are exponentially distributed with
a mean of so many seconds. The first run is planned from (its newest checkpoint, its event log, and --mtbf with that
mean; of the table, from half as long a run: the plan is for the step that the second run comes to). The second run, of
other instants, is measured: the largest arena that it had, the median of its persists, and the useful time as a share
of the time between its first and its last step. A line of JSON for each job, and a table.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from fastckpt._core.memory.census import census
from fastckpt._core.report import events, goodput, report
from fastckpt._core.report.goodput import TRAINING

HERE = Path(__file__).parent
KINDS = ("ddp", "fsdp", "table")
WORKERS = 2
Row = dict[str, Any]


class Run:
    """One run of a job in a folder of its own, for so many seconds from its first save on."""

    def __init__(self, kind: str, folder: Path, seed: int, options: argparse.Namespace) -> None:
        self._kind, self._options, self._random = kind, options, random.Random(f"{kind} {seed}")
        self.out, self._log = folder / "checkpoints", folder / "log"
        folder.mkdir()
        self.arena = 0

    def measure(self, seconds: float) -> None:
        shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fastckpt-bench-"))
        environment = {"OMP_NUM_THREADS": "1", "FASTCKPT_SHM_DIR": str(shm), "PYTHONPATH": str(HERE.parent)}
        environment |= {"TMPDIR": str(self._log.parent)}
        options = self._options
        script = [str(HERE / "plan_train.py"), "--kind", self._kind, "--out", str(self.out)]
        script += ["--megabytes", str(options.megabytes), "--step-seconds", str(options.step_seconds)]
        launcher = ["fastckpt_run", "--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000"]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *launcher, *script], stdout=log, stderr=log, env=os.environ | environment
            )
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(shm, ended))
        try:
            watch.start()
            self._strike(process, seconds)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            ended.set()
            watch.join()
            shutil.rmtree(shm, ignore_errors=True)

    def _watch(self, shm: Path, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            with contextlib.suppress(OSError):
                self.arena = max([self.arena, *(entry.size for entry in census(shm))])

    def _strike(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        limit = time.monotonic() + 120
        while not self._pids() or not self.arena:
            if process.poll() is not None or time.monotonic() > limit:
                raise SystemExit(self._log.read_text()[-3000:])
            time.sleep(0.1)
        end = time.monotonic() + seconds
        while (wait := self._random.expovariate(1 / self._options.mean)) < (left := end - time.monotonic()):
            time.sleep(wait)
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(self._random.choice(self._pids()), signal.SIGKILL)
        time.sleep(max(0.0, left))

    def _pids(self) -> list[int]:
        """The workers of the last round that was started, unless they were stopped since."""
        pids = list[int]()
        for event in self._events():
            if event["event"] == "workers_started":
                pids = list(event["pids"].values())
            elif event["event"] == "workers_stopped":
                pids = []
        return pids

    def _events(self) -> list[Any]:
        folder = self.out / events.FOLDER
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        return [event for path in paths for event in events.read(path).events]

    def results(self) -> Row:
        found = report.report([events.read(path) for path in events.find(self.out)])
        (placed,) = next(iter(found.nodes.values()))
        training = [i for i, span in enumerate(placed.spent.spans) if TRAINING & span.shares.keys()]
        within = placed.spent.spans[training[0] : training[-1] + 1]
        persists = [event for event in self._events() if event["event"] in ("persisted", "flush_done")]
        return {
            "arena": self.arena,
            # As long as one of the last size takes: of the table, earlier ones were smaller.
            "persist": median(event["seconds"] / event["bytes"] for event in persists) * persists[-1]["bytes"],
            "goodput": goodput.total(span.shares for span in within)[goodput.USEFUL]
            / sum(span.end - span.begin for span in within),
            "step": found.steps.furthest,
            "failures": len(found.failures),
        }


def planned(run: Run, step: int, options: argparse.Namespace) -> Row:
    """The plan from a run, for a job that comes to this step."""
    command = [sys.executable, "-c", "from fastckpt_run.cli import main; main()", "plan", str(run.out)]
    text = subprocess.run(
        [*command, "--mtbf", f"{options.mean}s", "--json"],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parent)},
    ).stdout
    plan = json.loads(text)
    growth = plan["growth"]
    larger = 1 + growth["per_step"] * max(0, step - growth["step"]) / growth["size"] if growth else 1.0
    return {
        "arena": plan["memory"]["arena"] * larger,
        "persist": plan["persist"]["seconds"] * larger,
        "goodput": plan["goodput"]["memory"],
    }


def measure(kind: str, folder: Path, options: argparse.Namespace) -> Row:
    first, second = (Run(kind, folder / f"{kind}-{seed}", seed, options) for seed in (1, 2))
    first.measure(options.seconds / 2 if kind == "table" else options.seconds)
    second.measure(options.seconds)
    found = second.results()
    return {"kind": kind, "planned": planned(first, found["step"], options), "measured": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, from its first save")
    parser.add_argument("--mean", type=float, default=10.0, help="seconds between kills")
    parser.add_argument("--megabytes", type=float, default=36.0, help="of the state")
    parser.add_argument("--step-seconds", type=float, default=0.2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=HERE.parent) as name:
        rows = []
        for kind in options.kinds:
            rows.append(measure(kind, Path(name), options))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print("| job | what | planned | measured | difference |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        for what, scale, unit in (("arena", 1e6, "MB"), ("persist", 1e-3, "ms"), ("goodput", 1e-2, "%")):
            plan, real = row["planned"][what], row["measured"][what]
            cells = f"{plan / scale:.4g} {unit} | {real / scale:.4g} {unit} | {plan / real - 1:+.1%}"
            print(f"| {row['kind']} | {what} | {cells} |")


if __name__ == "__main__":
    main()
