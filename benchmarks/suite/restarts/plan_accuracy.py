"""The plan of a job beside what it takes: memory, seconds of a persist, goodput."""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Values
from benchmarks.harness.turn import Record, Turn, record, values_of

KINDS = ("ddp", "fsdp", "table")
WORKERS, WIDTH, LAYERS, ROWS = 2, 512, 11, 400
"""Ranks; width and layers of a model of 36 MB with AdamW; rows that each step adds to the table."""
SECONDS, MEAN, STEP = 60.0, 10.0, 0.2
"""Seconds of a run, between kills on average, and of a step, as a device would take."""


class Table:
    """Rows that are added as new keys come, as in a recommender's embedding."""

    def __init__(self) -> None:
        self.rows = torch.randn(20_000, 64)

    def grow(self) -> None:
        self.rows = torch.cat([self.rows, torch.randn(ROWS, 64)])

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def die(seed: str) -> None:
    """End this worker at an instant of an exponential distribution: of each rank, of all together the mean."""
    time.sleep(random.Random(seed).expovariate(1 / (MEAN * WORKERS)))
    os.kill(os.getpid(), signal.SIGKILL)


def train(turn: Turn, kind: str, folder: str, seconds: float) -> None:
    """The worker, for so many seconds from the first step of the first one on."""
    from fastckpt import Checkpointer
    from fastckpt._core.memory.census import census

    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = fully_shard(model) if kind == "fsdp" else nn.parallel.DistributedDataParallel(model)
    optimizer, table = torch.optim.AdamW(model.parameters(), 1e-4), Table()
    others = {"table": table} if kind == "table" else {}
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, others=others)
    step, goes_on, end = checkpointer.resume(), torch.ones(()), Path(f"{folder}.end")
    threading.Thread(target=die, args=(f"{folder} {start} {rank}",), daemon=True).start()
    while goes_on:
        begun = time.monotonic()
        model(torch.ones(4, WIDTH)).square().sum().backward()
        table.grow()
        time.sleep(max(0.0, begun + STEP - time.monotonic()))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        checkpointer.step(step)
        if rank == 0 and step % 5 == 0:
            with contextlib.suppress(OSError):
                record(arena=max(entry.size for entry in census(turn.shm)))
        if rank == 0 and not end.exists():
            end.write_text(f"{time.monotonic() + seconds}")
        goes_on.fill_(rank != 0 or time.monotonic() < float(end.read_text()))
        dist.broadcast(goes_on, 0)
    os._exit(0)  # before the thread that kills


def run(turn: Turn, kind: str, name: str, seconds: float) -> list[Record]:
    """Run a job for so long."""
    folder = str(turn.folder / name)
    return turn.job(train, kind, folder, seconds, options=["--max-restarts=1000"], workers=WORKERS)


def measured(folder: Path, records: list[Record]) -> dict[str, float]:
    """Results of a run: the largest arena, the median of its persists, goodput from the first step to the last."""
    from fastckpt._core.report import events, goodput, report

    found = report.report([events.read(path) for path in events.find(folder)])
    (placed,) = next(iter(found.nodes.values()))
    training = [i for i, span in enumerate(placed.spent.spans) if goodput.TRAINING & span.shares.keys()]
    within = placed.spent.spans[training[0] : training[-1] + 1]
    persists = [event for event in records if event.get("event") in ("persisted", "flush_done")]
    useful = goodput.total(span.shares for span in within)[goodput.USEFUL]
    return {
        "arena": max(values_of(records, "arena")),
        # As long as one of the last size takes: of the table, earlier ones were smaller.
        "persist": statistics.median(each["seconds"] / each["bytes"] for each in persists) * persists[-1]["bytes"],
        "goodput": useful / sum(span.end - span.begin for span in within),
        "step": found.steps.furthest,
    }


def planned(folder: Path, step: float) -> dict[str, float]:
    """The plan from a run, for a job that comes to this step."""
    code = "from fastckpt_run.commands import tools; tools()"
    command = [sys.executable, "-c", code, "plan", str(folder), "--mtbf", f"{MEAN:g}s", "--json"]
    plan = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    growth, larger = plan["growth"], 1.0
    if growth:
        larger += growth["per_step"] * max(0, step - growth["step"]) / growth["size"]
    return {
        "arena": plan["memory"]["arena"] * larger,
        "persist": plan["persist"]["seconds"] * larger,
        "goodput": plan["goodput"]["memory"],
    }


def measure(kind: str, turn: Turn) -> Values:
    """The plan from one run, of the table from half as long a one, divided by what another one took."""
    seconds = SECONDS / 4 if turn.is_quick else SECONDS
    run(turn, kind, "first", seconds / 2 if kind == "table" else seconds)
    real = measured(turn.folder / "second", run(turn, kind, "second", seconds))
    plan = planned(turn.folder / "first", real["step"])
    return {what: plan[what] / real[what] for what in plan}


BENCHMARK = Benchmark(
    name="plan_accuracy",
    question="How close is a plan to what a job takes?",
    work="Two workers, killed every 10 s on average, DDP, FSDP2, or a table that grows; planned : measured.",
    contenders=[Contender(kind, partial(measure, kind), quick=kind == "ddp") for kind in KINDS],
    figures=[
        Figure(f"{kind}: {what}", f"{kind}.{what}", unit="")
        for kind in KINDS
        for what in ("arena", "persist", "goodput")
    ],
    rounds=1,
    gigabytes=0.0,
)
