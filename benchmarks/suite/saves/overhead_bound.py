"""Training with saves at the automatic frequency, by turns with the same training without, in one job."""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.benchmark import Benchmark, Contender, Values
from benchmarks.harness.results import Run
from benchmarks.harness.turn import Record, Turn, record, values_of
from benchmarks.suite._processes import agent, processor_seconds

BOUND, ALLOWED = 0.05, 0.01
"""The overhead that saves are given, and by how much more of it a cell may show."""
STEPS = {"5 ms": (0.005, 1), "50 ms": (0.05, 1), "500 ms": (0.5, 1), "bursty": (0.05, 5)}
"""Seconds of a step, and how many times longer each tenth one is."""
MEGABYTES = 10, 100, 300
CORES = os.cpu_count() or 1
WORKERS = {"idle": max(1, CORES // 2), "busy": CORES}
"""Workers of one thread each: half of the cores are idle, or none."""
PAIRS, SECONDS, LONGEST = 5, 8.0, 30.0
"""Blocks with and without saves, and the seconds of a block, whole intervals of storage."""
WARM_UP, FIRST = 30.0, 100
"""Seconds, and steps, with saves before them: for the profile, and the first windows."""


class Training:
    """Work that takes as long as it should, on a model whose state is as large as it should be."""

    def __init__(self, seconds: float, burst: int, megabytes: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)
        # A parameter without a gradient: saved like all others, and no work for the optimizer, whatever its size.
        self.model.register_parameter("large", nn.Parameter(torch.randn(megabytes * 250_000)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._input, self._factor, self._burst, self._count = torch.randn(64, 64), torch.randn(192, 192), burst, 0
        self._products = max(1, round(seconds * self._rate()))

    def _rate(self) -> float:
        """Products per second, beside those of the other workers; the same in all."""
        self._multiply(50)
        dist.barrier()
        start, number = time.perf_counter(), 0
        while time.perf_counter() < start + 1.0:
            self._multiply(10)
            number += 10
        rate = torch.tensor(number / (time.perf_counter() - start))
        dist.broadcast(rate, 0)
        return float(rate)

    def _multiply(self, products: int) -> None:
        for _ in range(products):
            torch.matmul(self._factor, self._factor)

    def step(self) -> None:
        self._count += 1
        self._multiply(self._products * (self._burst if self._count % 10 == 0 else 1))
        self.optimizer.zero_grad()
        self.model(self._input).square().mean().backward()
        for each in self.model.parameters():
            if each.grad is not None:
                dist.all_reduce(each.grad)
        self.optimizer.step()


def train_by_turns(turn: Turn, seconds: float, burst: int, megabytes: int) -> None:
    """The worker: blocks with saves and without by turns, whose order changes from pair to pair."""
    from fastckpt import Checkpointer, phase

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training, saver, steps = Training(seconds, burst, megabytes), agent(), 0
    with Checkpointer(
        turn.folder / "checkpoints", model=training.model, optimizer=training.optimizer, overhead=BOUND
    ) as checkpointer:
        checkpointer.resume()

        def run(number: int, *, saves: bool) -> None:
            nonlocal steps
            with nullcontext() if saves else phase("steps without saves"):
                for _ in range(number):
                    training.step()
                    if saves:
                        steps += 1
                        checkpointer.step(steps)

        def block(pair: int, number: int, *, saves: bool) -> None:
            dist.barrier()
            start, own, theirs = time.perf_counter(), time.process_time(), processor_seconds(saver)
            run(number, saves=saves)
            wall = time.perf_counter() - start
            checkpointer._checkpointer.wait_latest_checkpoint()  # what its persists still use is a part of its cost
            dist.barrier()
            used = time.process_time() - own + (processor_seconds(saver) - theirs if dist.get_rank() == 0 else 0.0)
            record(pair=pair, saves=saves, wall=wall, used=used, steps=number)

        run(max(FIRST, math.ceil(WARM_UP / (3 if turn.is_quick else 1) / seconds)), saves=True)
        for pair in range(2 if turn.is_quick else PAIRS):
            number = length(checkpointer, seconds)
            for saves in (True, False) if pair % 2 else (False, True):
                block(pair, number, saves=saves)
    dist.destroy_process_group()


def length(checkpointer: object, seconds: float) -> int:
    """Steps of a block, alike in all workers: whole intervals of storage, if these are not too long."""
    decision = checkpointer._frequency.schedule.decision  # type: ignore[attr-defined]
    storage = decision.intervals.storage if decision else 1
    least, most = math.ceil(SECONDS / seconds), math.ceil(LONGEST / seconds)
    return min(-(-least // storage) * storage, most)


def measure(step: str, megabytes: int, cores: str, turn: Turn) -> Values:
    """All pairs of one job, and the intervals that it came to."""
    records = turn.job(train_by_turns, *STEPS[step], megabytes, workers=WORKERS[cores])
    decisions = [each for each in records if each.get("event") == "frequency" and each["memory"]]
    found: dict[str, list[float]] = {name: [] for name in ("time", "processor", "cores")}
    for pair in sorted({each["pair"] for each in records if "pair" in each}):
        (wall, used), (plain, without) = (of_block(records, pair, saves=saves) for saves in (True, False))
        found["time"].append(wall / plain)
        found["processor"].append(used / without)
        found["cores"].append(1 + (used - without) / (CORES * plain))
    last = decisions[-1] if decisions else {"memory": 0, "storage": 0, "overhead": None}
    return found | {name: [float(last[name] or 0)] for name in ("memory", "storage", "overhead")}


def of_block(records: Sequence[Record], pair: int, *, saves: bool) -> tuple[float, float]:
    """Seconds of a block, and those of the processor that the job used in it."""
    block = [each for each in records if each.get("pair") == pair and each["saves"] is saves]
    return max(values_of(block, "wall")), sum(values_of(block, "used"))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of some values, and half of its interval of 95% confidence."""
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    z, freedom = statistics.NormalDist().inv_cdf(0.975), len(values) - 1
    # The quantile of Student's t, by its expansion in the degrees of freedom.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def table(runs: Sequence[Run]) -> str:
    """A row for each kind of step, a column for each state and use of cores; and how many cells keep the bound."""
    columns = [f"{size} MB, {cores}" for size in MEGABYTES for cores in WORKERS]
    lines = [f"| step | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    times, used = [], []
    for step in STEPS:
        cells = []
        for column in columns:
            name = f"{step}, {column}"
            run = next((each for each in reversed(runs) if each.rounds(f"{name}.time")), None)
            if run is None:
                cells.append("-")
                continue
            times.append(interval(_values(run, name, "time")))
            # Where cores are idle, processor time takes nothing from training but its part of all of them.
            used.append(interval(_values(run, name, "processor" if name.endswith("busy") else "cores")))
            cells.append(_cell(*times[-1]))
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"- {_counted('Time', times)}", f"- {_counted('Processor time', used)}"])


def _counted(what: str, found: Sequence[tuple[float, float]]) -> str:
    """Return a sentence with the numbers of means within the bound, and of whole intervals within the allowance."""
    within = sum(mean <= 1 + BOUND for mean, _ in found)
    shown = sum(mean + half <= 1 + BOUND + ALLOWED for mean, half in found)
    return (
        f"{what}: the mean is within {1 + BOUND:g} in {within} of {len(found)} cells, "
        f"the whole interval within {1 + BOUND + ALLOWED:g} in {shown}."
    )


def _values(run: Run, cell: str, quantity: str) -> list[float]:
    return run.values(f"{cell}.{quantity}")


def _cell(mean: float, half: float) -> str:
    text = f"{mean:.3f} ±{half:.3f}"
    return f"**{text}**" if mean + half <= 1 + BOUND + ALLOWED else text


def cell(step: str, megabytes: int, cores: str) -> Contender:
    ways: Callable[[Turn], Values] = partial(measure, step, megabytes, cores)
    return Contender(f"{step}, {megabytes} MB, {cores}", ways, quick=(step, megabytes) == ("50 ms", 10))


BENCHMARK = Benchmark(
    name="overhead_bound",
    question="Do saves at the automatic frequency keep to an overhead of 5%?",
    work="Workers of one thread multiply matrices, on half of the cores (idle) or on all (busy). Each cell is the time "
    "of blocks with saves, divided by that of blocks without: the mean of 5 pairs, and its 95% interval. Bold: "
    "the whole interval is within 1.06. Bursty: each tenth step of 50 ms takes five times as long.",
    contenders=[cell(step, size, cores) for step in STEPS for size in MEGABYTES for cores in WORKERS],
    rounds=1,
    gigabytes=0.0,
    table=table,
)
