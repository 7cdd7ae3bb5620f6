"""The part "gpu" of benchmarks/offload.py: offloading beside ways that keep activations in the memory of the host.

Each way trains alone, then beside a job that augments images on all processors (benchmarks/augmentation.py): copies to
host memory and that job take bandwidth from one another. Then the largest batch of each way under a limit of memory.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

from augmentation import Augmentation

WAYS = ("none", "checkpoint", "offload", "both", "save_on_cpu pinned", "TRL")
ALONE = 3.0
"""Seconds for which the augmentation is measured without training."""
Found = dict[str, Any]


class Train(Protocol):
    """`train` of benchmarks/offload.py."""

    def __call__(self, way: str, options: argparse.Namespace, *more: object, limit: int = 0) -> Found | None:
        """Return the output of the training of one process; None if memory did not suffice."""


def measure(options: argparse.Namespace, train: Train, largest: Callable[[Callable[[int], bool]], int]) -> Found:
    """Time, memory and the largest batch of each way."""
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(
            f"--part gpu measures a GPU, and there is none for --device {options.device}; --device cpu tries the code"
        )
    ways = []
    for way in options.ways:
        if missing := why_not(way, options.device):
            print(f"skipped: {way}: {missing}")
        else:
            ways.append(way)
    if not {"none", "offload"} <= {*ways}:
        raise SystemExit("--part gpu compares with the ways none and offload; name them among --ways")
    name = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "no GPU: a trial of the code"
    print(f"\n{name}; {options.training}\n")
    return {"steps": steps(options, train, ways), "batches": batches(options, train, ways, largest)}


def why_not(way: str, device: str) -> str:
    """Return what a way lacks; empty if it can be measured."""
    if way == "TRL" and importlib.util.find_spec("trl") is None:
        return "trl is not installed"
    if way in ("TRL", "save_on_cpu pinned") and device == "cpu":
        return "it needs a GPU"
    return "" if way in WAYS else 'it is no way of the part "gpu"'


def steps(options: argparse.Namespace, train: Train, ways: list[str]) -> dict[str, list[tuple[Found, Found, float]]]:
    """All ways at one batch in turn, each alone and beside augmentation, with the images per second of that."""
    found: dict[str, list[tuple[Found, Found, float]]] = {way: [] for way in ways}
    budget, undisturbed = 0, []
    for _ in range(options.rounds):
        with Augmentation() as job:
            began = time.time()
            time.sleep(ALONE)
            undisturbed.append(job.rate(began, time.time()))
        for way in ways:
            more = ["--device", options.device, *(["--budget", budget] if budget else [])]
            alone = enough(train(way, options, *more))
            budget = budget or int(options.share * alone["memory"])
            with Augmentation() as job:
                beside = enough(train(way, options, *more))
                found[way].append((alone, beside, job.rate(*beside["between"])))
    images = statistics.median(undisturbed)
    print(
        f"memory by {found['none'][0][0]['by']}; budget {budget / 1e6:.0f} MB; "
        f"augmentation alone {images:.0f} images/s\n"
    )
    print(
        "| way | step, s | : none | memory, MB | : none | step beside augmentation, s | : alone | images/s | : alone |"
    )
    print("| --- " * 9 + "|")
    base = found["none"]
    for way, runs in found.items():
        step, other = (median(run[which]["steps"] for run in runs) for which in (0, 1))
        memory, rate = statistics.median(run[0]["memory"] for run in runs), statistics.median(run[2] for run in runs)
        slower = step / median(run[0]["steps"] for run in base)
        smaller = memory / statistics.median(run[0]["memory"] for run in base)
        print(
            f"| {way} | {step:.3f} | {slower:.2f} | {memory / 1e6:.0f} | {smaller:.2f} | {other:.3f} | "
            f"{other / step:.2f} | {rate:.0f} | {rate / images:.2f} |"
        )
    alike = {run["gradients"] for runs in found.values() for pair in runs for run in pair[:2]}
    print(f"gradients of all ways are {'equal' if len(alike) == 1 else 'NOT equal'}")
    last = found["offload"][-1][0]
    print(
        f"offload: written at {last['write_rate'] / 1e9:.2f} GB/s, read at {last['read_rate'] / 1e9:.2f}; planned "
        f"{last['wait_planned'] or 0:.3f} s longer, waited {last['wait_measured']:.3f}; {last['gpu_way'] or 'no GPU'}"
    )
    return found


def batches(
    options: argparse.Namespace, train: Train, ways: list[str], largest: Callable[[Callable[[int], bool]], int]
) -> dict[str, list[tuple[int, float]]]:
    """The largest batch of each way under a limit, as torch's allocator enforces it, or the kernel without a GPU."""
    few = ["--device", options.device, "--warmup", 1, "--steps", 1]
    resident = enough(train("none", options, "--batch", 1, *few))["resident"]
    limit = int(resident + options.limit * 1e6)
    print(f"\nlimit {limit / 1e6:.0f} MB, {options.limit} above the resident state\n")
    print("| way | largest batch | : none | samples/s |\n| --- | --- | --- | --- |")
    rates: dict[str, list[tuple[int, float]]] = {}
    for way in ways:
        tried: dict[int, float] = {}

        def fits(batch: int, way: str = way, tried: dict[int, float] = tried) -> bool:
            more = ["--batch", batch, "--budget", max(4 << 20, int(0.4 * options.limit * 1e6)), *few]
            of_kernel = limit if options.device == "cpu" else 0
            done = train(way, options, *more, *([] if of_kernel else ["--limit", limit]), limit=of_kernel)
            if done:
                tried[batch] = batch / done["steps"][-1]
            return done is not None

        best = largest(fits)
        rates[way] = sorted(tried.items())
        first = max(tried_of[0] for tried_of in rates["none"])
        print(f"| {way} | {best} | {best / first:.1f} | {tried.get(best, 0):.2f} |", flush=True)
    return rates


def median(runs: Any) -> float:
    """The median of the medians of runs."""
    return statistics.median(statistics.median(run) for run in runs)


def enough(found: Found | None) -> Found:
    if found is None:
        raise SystemExit("a process ended for its memory where none is limited; give smaller sizes by --training")
    return found
