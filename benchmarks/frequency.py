"""What checkpoints cost at the frequency that is chosen for them (after CheckFreq, FAST'21, sections 5.3 and 5.4).

    python benchmarks/frequency.py [--models vgg resnet gpt2] [--mbps 0 100] [--iterations 300] [--competitor]

One worker trains on one core; the others are left to checkpoints, as beside an accelerator. For each model and storage:
the intervals that `fastckpt.Checkpointer` comes to within 3.5%, and at these intervals, by turns in one process, what a
checkpoint stalls training and costs in all: ``torch.save`` and fsync, a copy that training waits for and a persist in
the background, and both in the background. With ``--competitor`` another process writes to the same disk from iteration
100 on: intervals that stay, and intervals that follow. Costs in all are against plain iterations in between.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BOUND = 0.035
Line = dict[str, Any]
COMPETITOR = """
import mmap, os, sys
block = mmap.mmap(-1, 64 << 20)
while True:
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    for _ in range(8):
        os.write(file, block)
    os.fsync(file)
    os.close(file)
"""


class Run:
    """A training under fastckpt-run in a folder of its own."""

    def __init__(self, folder: Path, model: str, mbps: float) -> None:
        folder.mkdir(parents=True)
        self.folder, self._model, self._mbps = folder, model, mbps

    def start(self, *script: str) -> subprocess.Popen[bytes]:
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), "PYTHONPATH": str(HERE.parent)}
        own |= {"FASTCKPT_EVENTS": str(self.folder / "events"), "FASTCKPT_PERSIST_MBPS": str(self._mbps)}
        train = [str(HERE / "frequency_train.py"), "--model", self._model, "--mbps", str(self._mbps)]
        train += ["--out", str(self.folder / "lines"), "--folder", str(self.folder), *script]
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "fastckpt_run", "--standalone", "--nproc-per-node=1", *train],
                stdout=output, stderr=output, env=os.environ | own,
            )  # fmt: skip

    def run(self, *script: str) -> None:
        if self.start(*script).wait():
            raise SystemExit((self.folder / "output").read_text()[-3000:])

    def lines(self) -> list[Line]:
        return _lines(self.folder / "lines")

    def chosen(self) -> Line:
        """The last decision on the frequency."""
        return [line for line in _lines(self.folder / "events") if line["event"] == "frequency"][-1]

    def count(self, event: str) -> int:
        return sum(1 for line in _lines(self.folder / "events") if line["event"] == event)


def _lines(path: Path) -> list[Line]:
    text = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in text if line.endswith("\n")]


def cost(lines: list[Line], block: str = "checkpoints") -> tuple[float, float]:
    """The part of training time that a block's checkpoints cost: in all, against plain iterations, and as stalls."""
    plain = statistics.fmean(line["seconds"] for line in lines if line["block"] == "plain")
    mine = [line for line in lines if line["block"] == block]
    stalled = sum(line["stall"] for line in mine) / sum(line["seconds"] for line in mine)
    return statistics.fmean(line["seconds"] for line in mine) / plain - 1, stalled


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def head(*cells: str) -> None:
    row(*cells)
    row(*["---"] * len(cells))


def parts(numbers: tuple[float, float]) -> list[str]:
    return [f"{number:.2%}" for number in numbers]


def compare(folder: Path, model: str, mbps: float, options: argparse.Namespace) -> None:
    """A row of the table for each way, at the intervals that were chosen."""
    auto = Run(folder / "auto", model, mbps)
    auto.run("--iterations", str(options.iterations))
    chosen, lines = auto.chosen(), auto.lines()
    settled = lines[len(lines) // 2 :]
    iteration = statistics.median(line["seconds"] for line in settled if line["block"] == "plain")
    size = max(line["bytes"] for line in _lines(auto.folder / "events") if line["event"] == "persisted")
    every = (str(chosen["memory"]), str(chosen["storage"]))
    common = (model, f"{mbps:g} MB/s" if mbps else "native", f"{size / 1e6:.0f}", f"{iteration:.3f}", ", ".join(every))
    row(*common, "chosen, and followed", "", *parts(cost(settled)))
    fixed = Run(folder / "compare", model, mbps)
    fixed.run("--compare", "--every", *every, "--repeats", str(options.repeats))
    lines = fixed.lines()
    lines = lines[len(lines) // (options.repeats + 1) :]
    for block in dict.fromkeys(line["block"] for line in lines if line["block"] != "plain"):
        mine = [line for line in lines if line["block"] == block]
        stall = sum(line["stall"] for line in mine) / sum(line["saved"] for line in mine)
        row(*common, block, f"{1000 * stall:.1f}", *parts(cost(lines, block)))


def compete(folder: Path, model: str, options: argparse.Namespace) -> None:
    """Intervals that stay and that follow, while another process writes to the disk from iteration 100 on."""
    alone = Run(folder / "alone", model, 0.0)
    alone.run("--iterations", str(options.iterations))
    every = (str(alone.chosen()["memory"]), str(alone.chosen()["storage"]))
    head("intervals", "at the end", "cost in all", "stalls", "persisted", "skipped")
    for name, script in {"stay": ("--every", *every), "follow": ()}.items():
        run = Run(folder / name, model, 0.0)
        process = run.start("--iterations", str(options.iterations), *script)
        while sum(1 for line in run.lines() if line["block"] == "checkpoints") < 100:
            time.sleep(0.1)
        begun = len(run.lines())
        competitor = subprocess.Popen([sys.executable, "-c", COMPETITOR, str(folder / "competitor")])
        process.wait()
        competitor.send_signal(signal.SIGKILL)
        competitor.wait()
        ends = every if script else (str(run.chosen()["memory"]), str(run.chosen()["storage"]))
        row(name, ", ".join(ends), *parts(cost(run.lines()[begun:])), run.count("persisted"), run.count("skipped"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vgg", "resnet", "gpt2"])
    parser.add_argument("--mbps", nargs="+", type=float, default=[0.0, 100.0], help="limits of storage; 0 for none")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--competitor", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=HERE.parent) as name:
        folder = Path(name)
        if options.competitor:
            compete(folder / "competitor-runs", options.models[0], options)
            return
        head("model", "storage", "MB", "iteration, s", "every", "way", "a stall, ms", "cost in all", "stalls")
        for model in options.models:
            for mbps in options.mbps:
                compare(folder / f"{model}-{mbps:g}", model, mbps, options)


if __name__ == "__main__":
    main()
