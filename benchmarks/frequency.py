"""Measures checkpoints at the frequency that is chosen for them (after CheckFreq, FAST'21, sections 5.3 and 5.4).

    python benchmarks/frequency.py --models resnet gpt2 gpt2-wide vgg [--mbps 0 100] [--seconds 60]
    python benchmarks/frequency.py --competitors trainer writer [--policies stay follow] [--rival vgg] [--seconds 60]
    python benchmarks/frequency.py [--picture docs/images/frequency.png]  # only the tables of what was measured before

One worker trains on one core; the others are left to checkpoints, as beside an accelerator. For each model and storage
the intervals are measured that `fastckpt.Checkpointer` comes to within 3.5%. At these intervals, by turns in one
process, the stall and the whole cost of a checkpoint are measured. The ways are ``torch.save`` and fsync, a copy that
training waits for with a persist in the background, and both in the background. Costs in all are against blocks of
iterations without checkpoints, before and after; their error is the standard error of these comparisons.

With ``--competitors`` something else begins after iteration 100: a second training with checkpoints of its own, which
leaves no core idle, or a process that writes to the same disk. Intervals that stay as they were chosen before, and
intervals that follow. What is measured is added to ``--results``, from which the tables are made; the last of a kind
counts.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EPOCH = 2500
"""Iterations of an epoch: ImageNet's, at 512 images each."""
BEFORE = 100
"""Iterations before a competitor begins."""
POLICIES = ("stay", "follow")
WAYS = ("torch.save, fsync", "persist in the background", "both in the background")
Line = dict[str, Any]
WRITER = """
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
    """A job under fastckpt-run in a folder of its own."""

    def __init__(self, folder: Path, model: str, mbps: float) -> None:
        folder.mkdir(parents=True)
        self.folder, self._model, self._mbps = folder, model, mbps

    @contextmanager
    def started(self, *script: str) -> Iterator[subprocess.Popen[bytes]]:
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), "PYTHONPATH": str(HERE.parent)}
        own |= {"FASTCKPT_EVENTS": str(self.folder / "events"), "FASTCKPT_PERSIST_MBPS": str(self._mbps)}
        train = [str(HERE / "frequency_train.py"), "--model", self._model, "--mbps", str(self._mbps)]
        train += ["--out", str(self.folder / "lines"), "--folder", str(self.folder), "--epoch", str(EPOCH), *script]
        command = [sys.executable, "-m", "fastckpt_run", "--standalone", "--nproc-per-node=1", *train]
        with (self.folder / "output").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | own)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    def run(self, *script: str) -> None:
        with self.started(*script) as process:
            self.ended(process)

    def ended(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait():
            raise SystemExit((self.folder / "output").read_text()[-3000:])

    def wait_for(self, iterations: int, process: subprocess.Popen[bytes]) -> None:
        while len(self.lines()) < iterations:
            if process.poll() is not None:
                raise SystemExit((self.folder / "output").read_text()[-3000:])
            time.sleep(0.1)

    def lines(self) -> list[Line]:
        return _lines(self.folder / "lines")

    def events(self, name: str) -> list[Line]:
        return [line for line in _lines(self.folder / "events") if line["event"] == name]

    def decisions(self) -> list[Line]:
        """The intervals that were chosen one after the other, and what those before had cost by its own account."""
        names = ("step", "memory", "storage", "overhead")
        return [{name: line[name] for name in names} for line in self.events("frequency") if line["memory"]]

    def chosen(self) -> list[int]:
        """Return the intervals that were chosen last."""
        last = self.decisions()[-1]
        return [last["memory"], last["storage"]]


def _lines(path: Path) -> list[Line]:
    text = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in text if line.endswith("\n")]


def cost(lines: list[Line], kind: str) -> Line:
    """Return the cost of a kind's checkpoints: each of its blocks is compared with the plain blocks around it."""
    grouped = [list(block) for _, block in groupby(lines, lambda line: line["block"])]
    blocks = [(block[0]["kind"], statistics.fmean(line["seconds"] for line in block)) for block in grouped]
    blocks = [(each, seconds) for each, seconds in blocks if each in (kind, "plain")]
    parts = []
    for i, (each, seconds) in enumerate(blocks):
        around = [other for near, other in blocks[max(0, i - 1) : i + 2] if near == "plain"]
        if each == kind and around:
            parts.append(seconds / statistics.fmean(around) - 1)
    mine = [line for line in lines if line["kind"] == kind]
    return {
        "cost": statistics.fmean(parts),
        "error": statistics.stdev(parts) / len(parts) ** 0.5 if len(parts) > 1 else None,
        "stalls": sum(line["stall"] for line in mine) / sum(line["seconds"] for line in mine),
        "stall": sum(line["stall"] for line in mine) / max(1, sum(line["saved"] for line in mine)),
        "iterations": len(mine),
    }


def choose(folder: Path, model: str, mbps: float, options: argparse.Namespace) -> tuple[Run, list[int]]:
    """The intervals that a job comes to by itself."""
    run = Run(folder, model, mbps)
    run.run("--seconds", str(options.choose), "--iterations", str(options.iterations))
    return run, run.chosen()


def compare(folder: Path, model: str, mbps: float, options: argparse.Namespace) -> Line:
    """Return the cost of each way at the intervals that are chosen."""
    auto, every = choose(folder / "auto", model, mbps, options)
    fixed = Run(folder / "compare", model, mbps)
    fixed.run("--compare", "--every", *map(str, every), "--seconds", str(options.seconds))
    lines = fixed.lines()
    return {
        "part": "ways",
        "model": model,
        "mbps": mbps,
        "bytes": max(line["bytes"] for line in auto.events("persisted")),
        "iteration": statistics.median(line["seconds"] for line in lines if line["kind"] == "plain"),
        "every": every,
        "decisions": auto.decisions(),
        "ways": {way: cost(lines, way) for way in WAYS},
    }  # fmt: skip


@contextmanager
def writer(folder: Path, options: argparse.Namespace) -> Iterator[None]:
    """Another process that writes to the disk."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder / "written")])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        (folder / "written").unlink(missing_ok=True)


@contextmanager
def trainer(folder: Path, options: argparse.Namespace) -> Iterator[None]:
    """Another training of the same model, with checkpoints as often as it may have them, under way."""
    second = Run(folder / "second", options.rival, 0.0)
    with second.started("--seconds", "100000") as process:
        second.wait_for(5, process)
        yield


COMPETITORS: dict[str, Callable[..., Any]] = {"trainer": trainer, "writer": writer}


def compete(folder: Path, name: str, every: list[int], policy: str, options: argparse.Namespace) -> Line:
    """Return the cost of checkpoints at intervals that stay or follow, from the start of a competitor on."""
    run = Run(folder, options.rival, 0.0)
    fixed = ("--every", *map(str, every)) if policy == "stay" else ()
    known = ("--iterations", str(BEFORE), "--plain", *fixed)
    with run.started("--seconds", str(options.seconds + options.quiet), *known) as process:
        run.wait_for(BEFORE, process)
        before = list(dropwhile(lambda line: not line["saved"], run.lines()))
        with COMPETITORS[name](folder, options):
            begun, moment = len(run.lines()), time.monotonic()
            run.ended(process)
    lines = run.lines()[begun:]
    return {
        "part": "competitor",
        "model": options.rival,
        "competitor": name,
        "policy": policy,
        "every": every,
        "end": every if fixed else run.chosen(),
        "decisions": [] if fixed else run.decisions(),
        "before": cost(before, "checkpoints"),
        "all": cost(lines, "checkpoints"),
        "late": cost(lines[len(lines) // 2 :], "checkpoints"),
        "iteration": statistics.median(line["seconds"] for line in lines if line["kind"] == "plain"),
        **{event: sum(line["monotonic"] > moment for line in run.events(event)) for event in ("persisted", "skipped")},
    }


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def head(*cells: str) -> None:
    print()
    row(*cells)
    row(*["---"] * len(cells))


def part(found: Line) -> str:
    return f"{found['cost']:.1%}" + ("" if found["error"] is None else f" ± {found['error']:.1%}")


def storage(mbps: float) -> str:
    return f"{mbps:g} MB/s" if mbps else "native"


def tables(results: list[Line]) -> None:
    """The newest of each kind."""
    ways = newest(results, "ways", ("model", "mbps"))
    if ways:
        head(
            "model", "state, MB", "iteration, s", "storage", "every (memory, storage)", "times per epoch", "cost in all"
        )
    for each in ways:
        common = (each["model"], f"{each['bytes'] / 1e6:.0f}", f"{each['iteration']:.2f}", storage(each["mbps"]))
        often = " and ".join(f"{EPOCH // steps}" for steps in each["every"])
        row(*common, "{}, {}".format(*each["every"]), often, part(each["ways"][WAYS[-1]]))
    if ways:
        head("model, storage", "way", "a stall, ms", "stalls", "cost in all", "iterations")
    for each in ways:
        for way, found in each["ways"].items():
            cells = (f"{1000 * found['stall']:.1f}", f"{found['stalls']:.1%}", part(found), found["iterations"])
            row(f"{each['model']}, {storage(each['mbps'])}", way, *cells)
    competitors = newest(results, "competitor", ("competitor", "policy"))
    if competitors:
        head("competitor", "intervals", "in the end", "before", "cost in all", "second half", "persisted", "skipped")
    for each in competitors:
        costs = (part(each[name]) for name in ("before", "all", "late"))
        ends = "{}, {}".format(*each["end"])
        row(f"{each['competitor']}, {each['model']}", each["policy"], ends, *costs, each["persisted"], each["skipped"])


def newest(results: list[Line], kind: str, keys: tuple[str, ...]) -> list[Line]:
    """The last result for each combination of keys."""
    return list({tuple(each[key] for key in keys): each for each in results if each["part"] == kind}.values())


def draw(results: list[Line], path: Path) -> None:
    """Bars of what a checkpoint stalls training, a panel for each storage."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    ways = newest(results, "ways", ("model", "mbps"))
    limits = sorted({each["mbps"] for each in ways})
    figure, panels = pyplot.subplots(1, len(limits), figsize=(9, 3.2), squeeze=False, sharey=True)
    for panel, mbps in zip(panels[0], limits, strict=True):
        shown = [each for each in ways if each["mbps"] == mbps]
        for i, way in enumerate(WAYS):
            stalls = [1000 * each["ways"][way]["stall"] for each in shown]
            bars = panel.bar([j + 0.28 * (i - 1) for j in range(len(shown))], stalls, 0.26, label=way)
            panel.bar_label(bars, fmt="%.3g", fontsize=7)
        panel.set_yscale("log")
        panel.set_ylim(1, 2 * max(found["stall"] * 1000 for each in ways for found in each["ways"].values()))
        panel.set_xticks(range(len(shown)), [each["model"] for each in shown], fontsize=8)
        panel.set_title(storage(mbps), fontsize=10, loc="left")
        panel.tick_params(labelsize=8)
    panels[0, 0].set_ylabel("stall of a checkpoint, ms", fontsize=9)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=90)


def measured(folder: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Yield the measurements that the options ask for, one after the other."""
    for model in options.models:
        for mbps in options.mbps:
            yield compare(folder / f"{model}-{mbps:g}", model, mbps, options)
    if not options.competitors:
        return
    alone = {(each["model"], each["mbps"]): each["every"] for each in _lines(options.results) if each["part"] == "ways"}
    every = alone.get((options.rival, 0.0)) or choose(folder / "alone", options.rival, 0.0, options)[1]
    for name in options.competitors:
        for policy in options.policies:
            yield compete(folder / f"{name}-{policy}", name, every, policy, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], help="resnet, gpt2, gpt2-wide, vgg")
    parser.add_argument("--mbps", nargs="+", type=float, default=[0.0, 100.0], help="limits of storage; 0 for none")
    parser.add_argument("--competitors", nargs="+", choices=COMPETITORS, default=[])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--rival", default="vgg", help="the model that has competitors")
    parser.add_argument("--choose", type=float, default=30.0, help="seconds to come to intervals")
    parser.add_argument("--iterations", type=int, default=130, help="those to come to intervals, at least")
    parser.add_argument("--seconds", type=float, default=60.0, help="of comparing; with a competitor")
    parser.add_argument("--quiet", type=float, default=30.0, help="seconds before a competitor, about")
    parser.add_argument("--results", type=Path, default=HERE.parent / ".bench-frequency.json", help="lines of JSON")
    parser.add_argument("--picture", type=Path, help="file for bars of stalls")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # jobs are ended with this process
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=HERE.parent) as name, options.results.open("a") as results:
        for result in measured(Path(name), options):
            results.write(json.dumps(result) + "\n")
            results.flush()
    tables(_lines(options.results))
    if options.picture:
        draw(_lines(options.results), options.picture)


if __name__ == "__main__":
    main()
