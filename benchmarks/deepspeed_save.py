"""Measures saves of a DeepSpeed engine, beside DeepSpeed's own and the bare copy.

    python benchmarks/deepspeed_save.py [--gigabytes 1.0] [--ranks 2] [--repeats 7] [--json FILE]

A GPT-2 with AdamW in ZeRO 2 on the CPU, over gloo, under a real `fastckpt-run`. All ways are measured by turns in the
same processes, each after a step that changed all of the state. *Blocked* is how long training stands still on the
slowest rank, *durable* the time from the begin of the save until the last rank knows that the files are on the disk.
DeepSpeed's own save does not sync its files: what it blocks for is no durable save, and its *durable* is that of the
same save with an fsync of each file after it. First saves, which touch memory for the first time, count apart. In the
end the files of both are compared, tensor by tensor.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SHM, MEMORY, DISK = 3.5, 8, 4
"""Room that is needed, as a multiple of the state."""
COPY, STOCK = "bare copy into warm memory", "DeepSpeed's save_checkpoint"
Line = list[dict[str, float]]


def check_room(options: argparse.Namespace) -> None:
    """End with a message if there is too little memory or disk."""
    rooms = [
        (str(options.shm), SHM, shutil.disk_usage(options.shm).free / 1e9),
        ("memory", MEMORY, psutil.virtual_memory().available / 1e9),
        (str(options.folder), DISK, shutil.disk_usage(options.folder).free / 1e9),
    ]
    for name, times, free in rooms:
        if free < (need := times * options.gigabytes):
            fitting = free / times
            raise SystemExit(f"{name} has {free:.1f} GB free; {need:.1f} are needed: try --gigabytes {fitting:.1f}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the job; nothing of it is left."""
    with (
        tempfile.TemporaryDirectory(prefix=".bench-", dir=options.folder) as folder,
        tempfile.TemporaryDirectory(prefix="fastckpt-bench-", dir=options.shm) as shm,
    ):
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "fastckpt_run", "--standalone", f"--nproc-per-node={options.ranks}"]
        command += ["--max-restarts=0", "--fast-no-flush", "--fast-no-event-log", "--fast-hang-timeout=off"]
        command += ["--log-dir", f"{folder}/logs", str(HERE / "deepspeed_save_train.py")]
        command += ["--gigabytes", str(options.gigabytes), "--repeats", str(options.repeats)]
        command += ["--seconds", str(options.seconds), "--folder", folder, "--out", str(out)]
        own = {"FASTCKPT_SHM_DIR": shm, "TMPDIR": folder, "PYTHONPATH": str(HERE.parent), "DS_ACCELERATOR": "cpu"}
        own |= {"FASTCKPT_PRELOAD": "off"}
        process = subprocess.Popen(command, env=os.environ | own)
        try:
            process.wait(options.seconds + 300)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
        if not out.exists():
            raise SystemExit(f"the job ended with {process.returncode} before it had measured anything")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def values(line: Line, kind: str) -> list[float]:
    """Return the values of all saves but the first."""
    return [each[kind] for each in line[1:] if kind in each]


def spread(line: Line, kind: str) -> str:
    """Median and range, in milliseconds."""
    if not (found := values(line, kind)):
        return "-"
    low, middle, high = (1000 * f(found) for f in (min, statistics.median, max))
    return f"{middle:.0f} ({low:.0f}-{high:.0f})"


def ratio(line: Line, limit: Line, kind: str) -> str:
    """Return the ratio of medians."""
    mine, least = values(line, kind), values(limit, kind)
    return f"{statistics.median(mine) / statistics.median(least):.2f}" if mine and least else "-"


def table(found: dict[str, Any]) -> Table:
    """All ways: milliseconds, and ratios to DeepSpeed's own and to the copy."""
    about, ways = found["about"], found["ways"]
    title = f"Saves in ZeRO 2: {about['ranks']} ranks, {about['bytes'] / 1e9:.2f} GB; ms, median (range)"
    shown = Table(title=title, title_justify="left")
    for head in ("way", "blocked", ": copy", ": DeepSpeed", "first", "durable", ": DeepSpeed + fsync"):
        shown.add_column(head, justify="left" if head == "way" else "right")
    for name, line in ways.items():
        shown.add_row(
            name,
            spread(line, "blocked"),
            ratio(line, ways[COPY], "blocked"),
            ratio(line, ways[STOCK], "blocked"),
            f"{1000 * line[0]['blocked']:.0f}",
            spread(line, "durable"),
            ratio(line, ways[STOCK], "durable"),
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of model and optimizer, over all ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7, help="of each way, after a first one, if there is time")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all repeats")
    parser.add_argument("--folder", type=Path, default=HERE.parent, help="a directory on the disk to write to")
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="a directory on a tmpfs")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    options = parser.parse_args()
    check_room(options)
    found = measure(options)
    Console(width=None if sys.stdout.isatty() else 160).print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found))
    if differing := found["about"]["differing"]:
        raise SystemExit(f"files differ from DeepSpeed's own: {', '.join(differing)}")
    print("the tensors of all files equal those of DeepSpeed's own, bit for bit")


if __name__ == "__main__":
    main()
