"""Measures the effect of interruptions on accuracy: with a loader that goes on, and with one that starts again.

    python benchmarks/accuracy.py [--epochs 15] [--every 10] [--picture docs/images/accuracy.png]

A small classifier of handwritten digits is trained three times from the same weights. The first run has no
interruption. The second is killed again and again with `ResumableDataLoader`, each time with another number of loader
workers. The third is killed as often with DataLoader, which shuffles in the same order after each start, because the
script sets a seed. Each start is a process, ended by SIGKILL a few steps after its last checkpoint; weights, optimizer
and position come from that checkpoint. Figure 6 of CheckFreq (Mohan et al., FAST 2021), small.

The data: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998
(CC BY 4.0); the 1,797 images of 8 x 8 of its test set, as scikit-learn ships them.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import random
import select
import signal
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fastckpt.data import ResumableDataLoader

DATA = Path(__file__).parent / "digits.csv.gz"
TESTS = 450
"""The last images, by other writers than most of the first."""
BATCH = 32
EVERY = 4
"""Steps between checkpoints."""
START_SECONDS = 120
KINDS = {"uninterrupted": "#b8c4d0", "resumable": "#1f5fa8", "anew": "#c4262e"}


class Digits(Dataset):
    """Images shifted sideways at random by at most one pixel, and their digits."""

    def __init__(self, images: torch.Tensor, digits: torch.Tensor) -> None:
        self.images, self.digits = images, digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index].roll(int(torch.randint(-1, 2, ())), 1), self.digits[index]


def read() -> tuple[Digits, Digits]:
    """Return the data to train with, and the data to test with."""
    with gzip.open(DATA, "rt") as lines:
        rows = [[int(float(number)) for number in line.split(",")] for line in lines]
    table = torch.tensor(rows)
    images, digits = table[:, :64].reshape(-1, 8, 8) / 16, table[:, 64]
    return Digits(images[:-TESTS], digits[:-TESTS]), Digits(images[-TESTS:], digits[-TESTS:])


@dataclass(frozen=True)
class Start:
    """One process.

    Attributes:
        kind: One of KINDS.
        folder: Folder of its checkpoint.
        end: The step at which it is killed; at or after ``steps`` it ends by itself.
        steps: Of the whole run.
        number: Counts the starts.
    """

    kind: str
    folder: Path
    end: int
    steps: int
    number: int


def batches(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def train(start: Start) -> None:
    """Train from the last checkpoint until the end, or to be killed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training, test = read()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    loader: Any = (
        DataLoader(training, BATCH, shuffle=True)
        if start.kind == "anew"
        else ResumableDataLoader(training, BATCH, shuffle=True, num_workers=start.number % 3)
    )
    file, first, curve = start.folder / "checkpoint.pt", 0, []
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, curve = state["step"], state["curve"]
        if start.kind != "anew":
            loader.load_state_dict(state["data"])
    for step, (images, digits) in enumerate(batches(loader), first + 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), digits).backward()
        optimizer.step()
        if step % EVERY == 0 or step == start.steps:
            right = int((model(test.images).argmax(1) == test.digits).sum())
            curve.append([step, right / TESTS])
            data = {} if start.kind == "anew" else loader.state_dict()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data, "step": step}
            torch.save({**state, "curve": curve}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
        if step == start.steps:
            return
        if step == start.end:
            os.kill(os.getpid(), signal.SIGKILL)


def run(kind: str, steps: int, every: int, folder: Path) -> dict[str, Any]:
    """Run to the end, killed every so many steps on average; the last checkpoint, and how often it was killed."""
    folder.mkdir()
    draw, number, kills = random.Random(0), 0, 0
    while True:
        file = folder / "checkpoint.pt"
        reached = torch.load(file)["step"] if file.exists() else 0
        end = steps + 1 if kind == "uninterrupted" else reached + EVERY + draw.randrange(2 * (every - EVERY) + 1)
        start = Start(kind, folder, end, steps, number)
        process = multiprocessing.get_context("fork").Process(target=train, args=(start,))
        process.start()
        wait(process.pid)
        number += 1
        process.join()
        if process.exitcode == 0:
            return {**torch.load(file), "kills": kills}
        if process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"start {number} of {kind} ended with {process.exitcode}")
        kills += 1


def wait(pid: int) -> None:
    """Wait for that process alone: its loader workers notice seconds later that it was killed."""
    handle = os.pidfd_open(pid)
    ended, _, _ = select.select([handle], [], [], START_SECONDS)
    os.close(handle)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        raise TimeoutError(f"a start takes longer than {START_SECONDS} s")


def summary(results: dict[str, dict[str, Any]], target: float) -> dict[str, Any]:
    """Return the results of the curves."""
    plain, resumed = results["uninterrupted"], results["resumable"]
    same = all(torch.equal(plain["model"][name], resumed["model"][name]) for name in plain["model"])
    lines: dict[str, Any] = {"resumable_equals_uninterrupted": same and plain["curve"] == resumed["curve"]}
    for kind, result in results.items():
        steps, accuracies = zip(*result["curve"], strict=True)
        means = [statistics.mean(accuracies[i - 10 : i]) for i in range(10, len(steps) + 1)]
        lines[kind] = {
            "kills": result["kills"],
            "end": round(means[-1], 4),
            "best": round(max(means), 4),
            "step_of_target": next((steps[i + 9] for i, mean in enumerate(means) if mean >= target), None),
        }
    return lines


def draw(results: dict[str, dict[str, Any]], target: float, per_epoch: int, path: Path) -> None:
    """Write the curves as a PNG."""
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    labels = {
        "uninterrupted": "never interrupted",
        "resumable": f"killed {results['resumable']['kills']} times, ResumableDataLoader",
        "anew": f"killed {results['anew']['kills']} times, DataLoader that starts anew",
    }
    for kind, color in KINDS.items():
        steps, accuracies = zip(*results[kind]["curve"], strict=True)
        width = 6 if kind == "uninterrupted" else 1.3
        axes.plot([step / per_epoch for step in steps], accuracies, color=color, lw=width, label=labels[kind])
    axes.axhline(target, color="#555555", lw=0.8, ls=":", label=f"target {target:.1%}")
    axes.set(xlabel="epoch (by steps)", ylabel="accuracy on images of the test set", ylim=(0.7, 0.96))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--every", type=int, default=10, help="steps between kills, on average; at least 5")
    parser.add_argument("--target", type=float, default=0.92, help="accuracy, as a mean over ten checkpoints")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    options = parser.parse_args()
    per_epoch = -(-len(read()[0]) // BATCH)
    with tempfile.TemporaryDirectory() as folder:
        results = {kind: run(kind, options.epochs * per_epoch, options.every, Path(folder) / kind) for kind in KINDS}
    print(json.dumps(summary(results, options.target), indent=2))
    if options.picture:
        draw(results, options.target, per_epoch, options.picture)


if __name__ == "__main__":
    main()
