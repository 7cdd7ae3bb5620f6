"""Measures saves and loads of a sharded model, beside their limits and beside each way that torch has.

    python benchmarks/fsdp_save.py [--gigabytes 1.5] [--ranks 2 4] [--repeats 5] [--seconds 530] [--json FILE]

A GPT-2 with AdamW, sharded by FSDP2 over gloo, under a real `fastckpt-run`. In each of three parts all ways are
measured by turns in the same processes: saves for which training waits until the state is copied, saves whose copies
overlap with the next forward and backward, and loads. *Blocked* is how long training stands still on the slowest rank:
in the call, and in front of the optimizer's step if the copy is not done by then. *Durable* is the time from the begin
of the save until the last rank knows that it is. First saves, which plan and touch memory for the first time, count
apart. In the end each way saves once more, the state is changed as soon as it may be, and what is loaded is compared
bit by bit with the state as it was. Ratios are to the limit as measured right before.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SHARES = {"waits": 0.48, "behind": 0.36, "loads": 0.16}
"""Shares of the time, for each part."""
START = 25
"""Seconds of it to start workers and make the model."""
SHM, MEMORY, DISK = 7, 11, 5
"""Room that is needed, as a multiple of the state."""
TITLES = {
    "waits": "Training waits until the state is copied",
    "behind": "The state is copied behind forward and backward",
    "loads": "Loads, in the same sharding",
}
Line = dict[str, Any]
Result = dict[str, Any]


def check_room(gigabytes: float, ranks: int, shm: Path, folder: Path) -> None:
    """End with a message if there is too little memory or disk."""
    rooms = [
        (str(shm), SHM * gigabytes, shutil.disk_usage(shm).free / 1e9),
        ("memory", MEMORY * gigabytes + ranks, psutil.virtual_memory().available / 1e9),
        (str(folder), DISK * gigabytes, shutil.disk_usage(folder).free / 1e9),
    ]
    for name, need, free in rooms:
        if free < need:
            fitting = gigabytes * free / need
            raise SystemExit(f"{name} has {free:.1f} GB free; {need:.1f} are needed: try --gigabytes {fitting:.1f}")


@contextmanager
def job(part: str, ranks: int, options: argparse.Namespace) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """Command and environment of one part, and the file of its results; nothing of it is left."""
    with (
        tempfile.TemporaryDirectory(prefix=".bench-", dir=options.folder) as folder,
        tempfile.TemporaryDirectory(prefix="fastckpt-bench-", dir=options.shm) as shm,
    ):
        out = Path(folder) / "out"
        command = [
            sys.executable,
            "-m",
            "fastckpt_run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--max-restarts=0",
        ]
        command += ["--fast-no-flush", "--fast-no-event-log", "--fast-hang-timeout=off"]
        # Two arenas, stagers and a copy have to fit: where there are two, each has two slots.
        command += ["--fast-slots=2"] if part == "waits" else []
        command += [str(HERE / "fsdp_save_train.py"), "--part", part, "--gigabytes", str(options.gigabytes)]
        command += ["--repeats", str(options.repeats), "--seconds", str(SHARES[part] * options.seconds - START)]
        command += ["--folder", folder, "--shm", shm, "--out", str(out), "--ways", *options.ways]
        own = {"FASTCKPT_SHM_DIR": shm, "TMPDIR": folder, "PYTHONPATH": str(HERE.parent)}
        try:
            yield command, os.environ | own, out
        finally:
            for block in Path("/dev/shm").glob(f"*{Path(shm).name}.*"):  # telemetry, if the agent was killed
                block.unlink(missing_ok=True)


def measure(part: str, ranks: int, options: argparse.Namespace) -> Result | None:
    """The results of one part; None, and why on the standard error, if it came to none."""
    with job(part, ranks, options) as (command, environment, out), tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        limit = SHARES[part] * options.seconds
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        if code != 0:
            said.seek(0)
            why = f"took more than {limit:.0f} s" if code is None else f"ended with {code}"
            print(f"{part} at {ranks} ranks {why}:\n{said.read()[-3000:]}", file=sys.stderr)
        found: Result | None = json.loads(out.read_text()) if out.exists() else None
        return None if found is None else {"part": part, "ended": code == 0, **found}


def end(process: "subprocess.Popen[str]") -> None:
    """End a launcher if it runs, and with it its workers."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def median(line: Line, kind: str) -> float | None:
    return statistics.median(line[kind]) if line.get(kind) else None


def spread(line: Line, kind: str) -> str:
    """Median and range, in milliseconds."""
    if not line.get(kind):
        return "-"
    low, middle, high = (1000 * f(line[kind]) for f in (min, statistics.median, max))
    return f"{middle:.0f} ({low:.0f}-{high:.0f})"


def ratio(line: Line, kind: str, *limits: str) -> str:
    """Return the ratio of medians to those of the limits, one after the other, as measured right before each."""
    mine, parts = median(line, kind), [median(line, limit) for limit in limits]
    least = None if None in parts else sum(part for part in parts if part)
    return f"{mine / least:.2f}" if mine and least else "-"


def table(result: Result) -> Table:
    """All ways of one part: milliseconds, and ratios to the limits."""
    about, lines = result["about"], [line for line in result["ways"] if line["name"]]
    is_loads, is_behind = result["part"] == "loads", result["part"] == "behind"
    title = f"{TITLES[result['part']]}: {about['ranks']} ranks, {about['bytes'] / 1e9:.2f} GB; ms, median (range)"
    shown = Table(title=title, title_justify="left")
    heads = ["way", "loaded" if is_loads else "blocked", ": copy", "first"]
    heads += [] if is_loads else ["durable"] if is_behind else ["durable", ": write", ": copy + write"]
    heads += [] if is_loads else ["consistent"]
    heads += ["step beside it"] if is_behind else []
    for head in heads:
        shown.add_column(head, justify="left" if head == "way" else "right")
    for line in lines:
        cells = [line["name"], spread(line, "later blocked"), ratio(line, "later blocked", "later copy")]
        cells += [spread(line, "first blocked")]
        if not is_loads:
            cells += [spread(line, "later durable")]
            limits = [] if is_behind else [("later write",), ("later copy", "later write")]
            cells += [ratio(line, "later durable", *each) for each in limits]
            cells += [{None: "-", True: "yes", False: "no"}[line.get("consistent")]]
        shown.add_row(*cells, *([spread(line, "later step")] if is_behind else []))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of model and optimizer, over all ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=5, help="of each way, if there is time")
    parser.add_argument("--seconds", type=float, default=530.0, help="for each number of ranks, at most")
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--ways", nargs="+", default=[], help="words: of saves only those with one in their name")
    parser.add_argument("--folder", type=Path, default=HERE.parent, help="a directory on the disk to write to")
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="a directory on a tmpfs")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # jobs are ended, and what they left removed
    console = Console(width=None if sys.stdout.isatty() else 180)
    results = []
    for ranks in options.ranks:
        for part in options.parts:
            check_room(options.gigabytes, ranks, options.shm, options.folder)
            if (result := measure(part, ranks, options)) is not None:
                results.append(result)
                console.print(table(result))
            if options.json:
                options.json.write_text(json.dumps(results))
    if len(results) < len(options.ranks) * len(options.parts) or not all(result["ended"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
