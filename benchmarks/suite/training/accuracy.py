"""Accuracy of a training that is killed again and again, by what its loader does then (figure 6 of CheckFreq, small).

Each start is a process, ended by SIGKILL a few steps after its last checkpoint; weights, optimizer and position come
from that. A plain DataLoader shuffles in the same order after each start, because the script sets a seed.

The data: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998
(CC BY 4.0); the 1,797 images of 8 x 8 of its test set, as scikit-learn ships them.
"""

import gzip
import multiprocessing
import os
import random
import signal
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Values
from benchmarks.harness.turn import Turn

DATA = Path(__file__).with_name("digits.csv.gz")
TESTS = 450
"""The last images, by other writers than most of the first."""
BATCH, EPOCHS = 32, 15
EVERY, BETWEEN = 4, 10
"""Steps between checkpoints, and between kills on average."""
MEAN = 10
"""Checkpoints over which an accuracy is averaged."""
PLAIN, OURS, STOCK = "uninterrupted", "ResumableDataLoader", "DataLoader"


class Digits(Dataset[Any]):
    """Images shifted sideways at random by at most one pixel, and their digits."""

    def __init__(self, table: torch.Tensor) -> None:
        self.images, self.digits = table[:, :64].reshape(-1, 8, 8) / 16, table[:, 64]

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index].roll(int(torch.randint(-1, 2, ())), 1), self.digits[index]


def read() -> tuple[Digits, Digits]:
    """Return the data to train with, and the data to test with."""
    with gzip.open(DATA, "rt") as lines:
        table = torch.tensor([[int(float(number)) for number in line.split(",")] for line in lines])
    return Digits(table[:-TESTS]), Digits(table[-TESTS:])


def batches(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def train(kind: str, file: Path, end: int, steps: int, number: int) -> None:
    """Train from the last checkpoint until the last step, or to be killed at ``end``."""
    from fastckpt.data import ResumableDataLoader

    torch.set_num_threads(1)
    torch.manual_seed(0)
    training, test = read()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    loader: Any = DataLoader(training, BATCH, shuffle=True)
    if kind != STOCK:
        loader = ResumableDataLoader(training, BATCH, shuffle=True, num_workers=number % 3)
    state = torch.load(file) if file.exists() else {"step": 0, "curve": []}
    if "model" in state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if kind != STOCK:
            loader.load_state_dict(state["data"])
    for step, (images, digits) in enumerate(batches(loader), state["step"] + 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), digits).backward()
        optimizer.step()
        if step % EVERY == 0 or step == steps:
            right = int((model(test.images).argmax(1) == test.digits).sum())
            state["curve"].append(right / TESTS)
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            data = {} if kind == STOCK else loader.state_dict()
            torch.save({**parts, "data": data, "curve": state["curve"]}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
        if step == steps:
            return
        if step == end:
            os.kill(os.getpid(), signal.SIGKILL)


def measure(kind: str, turn: Turn) -> Values:
    """One run to its end."""
    steps, file = -(-len(read()[0]) // BATCH) * (1 if turn.is_quick else EPOCHS), turn.folder / "checkpoint.pt"
    draw, number, code = random.Random(0), 0, -1
    while code != 0:
        reached = torch.load(file)["step"] if file.exists() else 0
        end = steps + 1 if kind == PLAIN else reached + EVERY + draw.randrange(2 * (BETWEEN - EVERY) + 1)
        process = multiprocessing.get_context("fork").Process(target=train, args=(kind, file, end, steps, number))
        process.start()
        process.join()  # without a limit: the sentinel would wait for its loader workers, too
        code, number = process.exitcode or 0, number + 1
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"start {number} of {kind} ended with {code}")
    found = torch.load(file)
    curve = found["curve"]
    means = [statistics.mean(curve[i - MEAN : i]) for i in range(MEAN, len(curve) + 1)]
    weights = sum(float(each.double().abs().sum()) for each in found["model"].values())
    return {"end": 100 * means[-1], "best": 100 * max(means), "kills": float(number - 1), "weights": weights}


BENCHMARK = Benchmark(
    name="accuracy",
    question="What does a loader that starts over cost in accuracy?",
    work="A classifier of 1,347 digits, 15 epochs, killed 70 times; a plain DataLoader has the same shuffle after each "
    "start.",
    contenders=[Contender(kind, partial(measure, kind)) for kind in (PLAIN, OURS, STOCK)],
    figures=[
        *(Figure(kind, f"{kind}.end", unit="%") for kind in (PLAIN, OURS, STOCK)),
        Figure("sums of weights, ours : uninterrupted", f"{OURS}.weights", f"{PLAIN}.weights"),
        *(Figure(f"{kind}: the best", f"{kind}.best", unit="%", is_detail=True) for kind in (PLAIN, OURS, STOCK)),
        Figure("kills", f"{OURS}.kills", unit="", is_detail=True),
    ],
    rounds=1,
    gigabytes=0.0,
)
