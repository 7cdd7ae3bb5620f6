"""The allocator of a process on the CPU: what returning freed memory costs, and what others than glibc's make of it."""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

Found = dict[str, Any]


def measure(options: argparse.Namespace, train: Callable[..., Found | None]) -> dict[str, list[Found]]:
    """Training with and without offloading, by glibc as it is, as offloading sets it, and by other libraries."""
    cases: dict[str, tuple[str, list[str], str]] = {
        "glibc as it is: none": ("none", ["--untuned"], ""),
        "glibc: none": ("none", [], ""),
        "glibc: offload": ("offload", [], ""),
    }
    for library in options.preload:
        cases |= {f"{library.name}: {way}": (way, ["--untuned"], str(library)) for way in ("none", "offload")}
    found: dict[str, list[Found]] = {name: [] for name in cases}
    budget = 0
    for _ in range(options.rounds):
        for name, (way, more, preload) in cases.items():
            given = ["--budget", budget] if budget else []
            found[name].append(done := train(way, options, *given, *more, preload=preload) or {})
            if name == "glibc: none" and not budget:
                budget = int(options.share * done["memory"])
    # Allocators that keep freed memory have it in what is resident before a step: all are compared with one base.
    base = statistics.median(run["resident"] for run in found["glibc: none"])
    first = next(iter(found.values()))
    most = statistics.median(run["resident"] + run["memory"] for run in first) - base
    print(
        "\n| allocator: way | step, s | : glibc as it is | memory, MB | : glibc as it is |\n| --- " + "| --- " * 4 + "|"
    )
    for name, runs in found.items():
        seconds = statistics.median(statistics.median(run["steps"]) for run in runs)
        slower = statistics.median(
            statistics.median(run["steps"]) / statistics.median(other["steps"])
            for run, other in zip(runs, first, strict=True)
        )
        memory = statistics.median(run["resident"] + run["memory"] for run in runs) - base
        print(f"| {name} | {seconds:.2f} | {slower:.2f} | {memory / 1e6:.0f} | {memory / most:.2f} |")
    return found
