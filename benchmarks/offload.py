"""Offloaded activations beside other ways to save memory: memory, time, rates, the largest batch, and depth.

    python benchmarks/offload.py DIRECTORY [--part steps batches depth codecs] [--rounds 3]
    python benchmarks/offload.py DIRECTORY --part steps batches --picture docs/images/offload.png
    python benchmarks/offload.py DIRECTORY --part allocators --preload LIBRARY...
    python benchmarks/offload.py DIRECTORY --part gpu --device cuda

DIRECTORY is on the SSD that is measured. Each figure is of a fresh process (benchmarks/offload_train.py), all ways in
turn, with memory as the peak of a cgroup where one can be made, else of the process. Beside them, in the same run, a
bare write and read of a file with O_DIRECT. "steps": all ways at one batch. "batches": the largest batch of each way
that ends under a limit of memory, as the kernel enforces it for a cgroup, and what it trains per second. "depth": the
growth of memory with the number of layers. "codecs": seconds and bytes of each form by density. Run if asked for:
"allocators", with and without offloading, and "gpu", the same training on a GPU.
"""

import argparse
import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import offload_allocators
import offload_gpu

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/offload_train.py"
WAYS = ("none", "checkpoint", "offload", "both", "torch.save", "save_on_cpu")
BATCHED = ("none", "checkpoint", "offload", "both")
BLOCK, BLOCKS = 8 << 20, 64
FILES = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), ("memory.max", "memory.swap.max")
Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--part", nargs="*", choices=tuple(PARTS), default=("steps", "batches", "depth", "codecs"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.1, help="the budget, as a share of none's memory, or --limit")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *offload_gpu.WAYS), help="default: all of a part")
    parser.add_argument("--device", default="cuda", help='of the part "gpu"; cpu tries its code')
    parser.add_argument("--training", default="--length 256", help="options of benchmarks/offload_train.py")
    parser.add_argument("--limit", type=int, default=500, help="MB of activations that fit, for the largest batch")
    parser.add_argument("--preload", type=Path, nargs="*", default=[], help="libraries of other allocators")
    parser.add_argument("--results", type=Path, help="a file of JSON, which each run adds to")
    parser.add_argument("--picture", type=Path, help="what to draw of steps and batches, those in --results included")
    options = parser.parse_args()
    of_part = offload_gpu.WAYS if options.part == ["gpu"] else WAYS
    options.ways = options.ways or of_part
    results: Found = {}
    if options.results and options.results.exists():
        results = json.loads(options.results.read_text())
    for part in options.part:
        results.setdefault(part, {}).update(PARTS[part](options) or {})
        if options.results:
            options.results.write_text(json.dumps(results))
    if options.picture:
        draw(results, options)
    return 0


# --- one process


def train(way: str, options: argparse.Namespace, *more: object, limit: int = 0, preload: str = "") -> Found | None:
    """Return the output of the training of one process; None if the kernel ended it for its memory."""
    with cgroup(limit) as group, tempfile.TemporaryDirectory(dir=options.directory) as made:
        given = [way, made, *options.training.split(), *more, *(["--cgroup", group] if group else [])]
        command = [sys.executable, str(SCRIPT), *map(str, given)]
        if group:
            # A process is in its cgroup before it starts Python: what it imports counts, too.
            command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({"LD_PRELOAD": preload} if preload else {})
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode == -9 or "can't allocate memory" in ended.stderr or "OutOfMemoryError" in ended.stderr:
        return None
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Path | None]:
    """A cgroup beside or below our own, with a limit of memory if it is not 0; None if none can be made."""
    made = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            folder = Path("/sys/fs/cgroup") / controllers / path.lstrip("/") / f"fastckpt-offload-{os.getpid()}"
            with contextlib.suppress(OSError):
                folder.mkdir()
                if any((folder / names[0]).exists() for names in FILES):
                    made = folder
                    break
                folder.rmdir()
    try:
        for names in FILES if made and limit else ():
            for name in names:
                with contextlib.suppress(OSError):
                    (made / name).write_text("0" if name == "memory.swap.max" else str(limit))
        yield made
    finally:
        if made:
            made.rmdir()


def bare_rates(directory: Path) -> tuple[float, float]:
    """Bytes per second of a bare write and read with O_DIRECT, by as many threads as offloading has."""
    blocks = [mmap.mmap(-1, BLOCK) for _ in range(2)]
    for block in blocks:
        block.write(os.urandom(BLOCK))
    descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)

    def half(which: int, transfer: Callable[[int, list[mmap.mmap], int], int]) -> None:
        for number in range(which, BLOCKS, 2):
            assert transfer(descriptor, [blocks[which]], number * BLOCK) == BLOCK

    def rate(transfer: Callable[[int, list[mmap.mmap], int], int]) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda which: half(which, transfer), range(2)))
        return BLOCK * BLOCKS / (time.perf_counter() - start)

    try:
        os.posix_fallocate(descriptor, 0, BLOCK * BLOCKS)
        return rate(os.pwritev), rate(os.preadv)
    finally:
        os.close(descriptor)


# --- parts


def steps(options: argparse.Namespace) -> dict[str, list[Found]]:
    """All ways at one batch, in turn."""
    found: dict[str, list[Found]] = {way: [] for way in options.ways}
    bare: list[tuple[float, float]] = []
    budget = 0
    for _ in range(options.rounds):
        bare.append(bare_rates(options.directory))
        for way in options.ways:
            more = ["--budget", budget] if budget else []
            found[way].append(done := train(way, options, *more, *traced(options)) or {})
            if way == "none" and not budget:
                budget = int(options.share * done["memory"])
    base = found["none"]
    print(f"\nmemory by {base[0]['by']}; budget {budget / 1e6:.0f} MB\n")
    print("| way | step, s | : none | memory, MB | : none | processor, s | gradients |\n| --- " + "| --- " * 6 + "|")
    for way, runs in found.items():
        seconds = [statistics.median(run["steps"]) for run in runs]
        slower = statistics.median(
            each / statistics.median(run["steps"]) for each, run in zip(seconds, base, strict=True)
        )
        memory = statistics.median(run["memory"] for run in runs)
        smaller = memory / statistics.median(run["memory"] for run in base)
        processor = statistics.median(run["processor"] for run in runs)
        alike = {run["gradients"] for run in runs} == {run["gradients"] for run in base}
        print(
            f"| {way} | {spread(seconds)} | {slower:.2f} | {memory / 1e6:.0f} | {smaller:.2f} | {processor:.2f} | "
            f"{'equal' if alike else 'DIFFER'} |"
        )
    for way in ("offload", "both"):
        if way in found:
            print(of_offloading(way, found[way], found["none" if way == "offload" else "checkpoint"], bare))
    return found


def of_offloading(way: str, runs: list[Found], without: list[Found], bare: list[tuple[float, float]]) -> str:
    """Rates beside the bare ones, processor time, and the plan beside what came."""
    rates = [
        f"{name} {statistics.median(run[name] for run in runs) / 1e9:.2f} GB/s of "
        f"{statistics.median(limits) / 1e9:.2f} bare ({statistics.median(ratios):.2f})"
        for name, limits in zip(("write_rate", "read_rate"), zip(*bare, strict=True), strict=True)
        for ratios in [[run[name] / limit for run, limit in zip(runs, limits, strict=True)]]
    ]
    moved = statistics.median(run["transferred"] for run in runs) / 1e9
    extra = statistics.median(a["processor"] - b["processor"] for a, b in zip(runs, without, strict=True))
    last = runs[-1]
    longer = statistics.median(
        statistics.median(a["steps"]) - statistics.median(b["steps"]) for a, b in zip(runs, without, strict=True)
    )
    planned = statistics.median(statistics.median(run["steps"]) for run in without) + (last["wait_planned"] or 0)
    came = statistics.median(statistics.median(run["steps"]) for run in runs)
    return (
        f"\n{way}: {'; '.join(rates)}; {moved:.2f} GB moved a step, {extra / moved if moved else 0:.2f} s of processor "
        f"per GB\n  wrote {last['wrote_measured'] / 1e6:.0f} MB, planned {(last['wrote_planned'] or 0) / 1e6:.0f}; "
        f"waited {last['wait_measured']:.3f} s, planned {last['wait_planned'] or 0:.3f}; a step is {longer:.3f} s "
        f"longer, {came:.2f} s where {planned:.2f} were planned ({came / planned:.2f});\n"
        f"  at most {last['peak'] / 1e6:.0f} MB of saved tensors of a budget of {last['budget'] / 1e6:.0f}"
    )


def batches(options: argparse.Namespace) -> dict[str, list[tuple[int, float]]]:
    """The largest batch of each way under a limit, and samples per second at some."""
    few = ["--warmup", 1, "--steps", 1]
    resident = needed(train("none", options, "--batch", 1, *few))["resident"]
    limit = int(resident + options.limit * 1e6)
    print(f"\nlimit {limit / 1e6:.0f} MB, {options.limit} above the resident state\n")
    print("| way | largest batch | : none | samples/s |\n| --- | --- | --- | --- |")
    rates: dict[str, list[tuple[int, float]]] = {}
    for way in [way for way in BATCHED if way in options.ways]:
        tried: dict[int, float] = {}

        def fits(batch: int, way: str = way, tried: dict[int, float] = tried) -> bool:
            budget = ["--budget", int(options.share * options.limit * 1e6)]
            done = train(way, options, "--batch", batch, *budget, *few, limit=limit)
            if done:
                tried[batch] = batch / done["steps"][-1]
            return done is not None

        best = largest(fits)
        rates[way] = sorted(tried.items())
        first = next(iter(rates.values()))[-1][0]
        print(f"| {way} | {best} | {best / first:.1f} | {tried.get(best, 0):.2f} |", flush=True)
    return rates


def largest(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, to a twelfth."""
    low, high = 0, 1
    while fits(high):
        low, high = high, high * 2
    while high - low > max(1, low // 12):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def depth(options: argparse.Namespace) -> None:
    """Growth of memory with the number of layers."""
    print("\n| way | 8 layers, MB | 32 layers, MB | growth |\n| --- | --- | --- | --- |")
    memory: dict[str, list[int]] = {}
    budget: list[object] = []
    for way in ("checkpoint", "both"):
        for layers in (8, 32):
            done = needed(train(way, options, "--layers", layers, *budget, "--steps", 2))
            memory.setdefault(way, []).append(done["memory"])
        small, large = memory[way]
        budget = ["--budget", max(4 << 20, int(options.share * small))]
        print(f"| {way} | {small / 1e6:.0f} | {large / 1e6:.0f} | {large / small - 1:.0%} |", flush=True)


def codecs(options: argparse.Namespace) -> None:
    """Seconds of one thread, and bytes, by type and density."""
    import torch

    from fastckpt._core.offload.codecs import decode, encode, sample_ratio

    torch.set_num_threads(1)
    print("\n| type, density | form | ratio (sample) | encode, s/GB | decode, s/GB |\n| --- | --- | --- | --- | --- |")
    count = 8 << 20
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        for density in (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.95):
            mask = torch.rand(count) < density
            tensor = mask if dtype == torch.bool else (torch.rand(count) + 1).to(dtype) * mask
            size = tensor.numel() * tensor.element_size()
            coding, encoded = least(lambda tensor=tensor: encode(tensor))
            decoding, _ = least(lambda encoded=encoded: decode(encoded.description, encoded.parts))
            print(
                f"| {str(dtype).removeprefix('torch.')}, {density:.2f} | {encoded.form} | {encoded.nbytes / size:.3f} "
                f"({sample_ratio(tensor):.3f}) | {coding / size * 1e9:.2f} | {decoding / size * 1e9:.2f} |"
            )


def least(work: Callable[[], Any]) -> tuple[float, Any]:
    """The least processor time of the calling thread, and the result."""
    found = []
    for _ in range(3):
        start = time.thread_time()
        result = work()
        found.append(time.thread_time() - start)
    return min(found), result


def needed(found: Found | None) -> Found:
    if found is None:
        raise RuntimeError("a process was ended for its memory where none is limited; free some and try again")
    return found


def traced(options: argparse.Namespace) -> list[str]:
    return ["--trace"] if options.picture or options.results else []


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "steps": steps,
    "batches": batches,
    "depth": depth,
    "codecs": codecs,
    "allocators": lambda options: offload_allocators.measure(options, train),
    "gpu": lambda options: offload_gpu.measure(options, train, largest),
}


def draw(drawn: Found, options: argparse.Namespace) -> None:
    """Memory over one step, and batch against throughput."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4))
    for number, way in enumerate(way for way in BATCHED if way in drawn.get("steps", {})):
        run = drawn["steps"][way][-1]
        (forward, _), *looks = run["trace"]
        lowest = min(size for _, size in looks)
        left.plot([at for at, _ in looks], [(size - lowest) / 1e6 for _, size in looks], linewidth=1, label=way)
        left.axvline(forward, linewidth=0.8, linestyle=":", color=f"C{number}")
    left.set_xlabel("seconds of one step; dotted: the forward ends", fontsize=8)
    left.set_ylabel("MB above the resident state", fontsize=8)
    for way, rates in drawn.get("batches", {}).items():
        right.plot(*zip(*rates, strict=True), ".-", linewidth=1, label=f"{way}, at most {rates[-1][0]}")
    right.set_xlabel(f"batch, as far as {options.limit} MB allow", fontsize=8)
    right.set_ylabel("samples per second", fontsize=8)
    right.set_xscale("log", base=2)
    for panel in (left, right):
        panel.set_ylim(0, 1.15 * panel.dataLim.y1)
        panel.tick_params(labelsize=8)
        panel.legend(fontsize=7, loc="upper right" if panel is left else "lower left")
    figure.tight_layout()
    figure.savefig(options.picture, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
