"""Fuzzing of data: jobs of random kinds of data, ranks and workers are killed and go on; each sample is used once.

    python -m tests.fuzz.data [FIRST] [END]

A job's ranks are loaders of one process, which is forked for each start, and killed by SIGKILL with its loader workers:
at a step that its seed says, before, in or after the writing of the state, or by the clock. What was committed is
compared with an uninterrupted job: sample by sample, with the random numbers that each drew.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fastckpt.data import ResumableDataLoader, data_state, load_data_state
from tests.fuzz.data_kinds import KINDS, Place
from tests.fuzz.forked import forked
from tests.unit.data.jobs import in_order

RESTS: dict[str, dict[str, bool]] = {"pad": {}, "drop": {"drop_last": True}, "uneven": {"uneven": True}}
RANKS, BATCH = 3, 5
WIDEST = RANKS * BATCH
"""Samples of a step, at most: fewer may be dropped at the end of an epoch, also by a start that is killed then."""


@dataclass(frozen=True)
class Shape:
    """How a start reads."""

    world: int
    workers: int
    batch: int


class Case:
    """A job, drawn from its number."""

    def __init__(self, seed: int, kills: int = 6) -> None:
        self.seed, self.name = seed, list(KINDS)[seed % len(KINDS)]
        self.kind, draw = KINDS[self.name], random.Random(seed)
        self.length = draw.choice([draw.randrange(4), draw.randrange(60), *2 * [draw.randrange(60, 200)]])
        self.epochs, self.rest = draw.randint(1, 3), draw.choice(list(RESTS)) if self.kind.rests else "uneven"
        self.kills = draw.randint(1, kills)
        self.first = self._shape(draw)

    def shape(self, start: int) -> Shape:
        return self.first if self.kind.fixed else self._shape(random.Random(f"{self.seed}/{start}"))

    def _shape(self, draw: random.Random) -> Shape:
        return Shape(draw.randint(1, RANKS), draw.randint(0, self.kind.workers), draw.randint(1, BATCH))

    def loaders(self, shape: Shape, folder: Path) -> list[ResumableDataLoader]:
        """Those of all ranks."""
        made = []
        for rank in range(shape.world):
            options = self.kind.make(Place(self.length, self.seed % 1000, rank, shape.world, folder))
            options |= RESTS[self.rest] if self.kind.rests else {}
            options |= {"batch_size": shape.batch} if self.kind.batched else {}
            if "sampler" not in options or self.name != "resumable_sampler":
                options |= {"num_replicas": shape.world, "rank": rank}
            made.append(ResumableDataLoader(num_workers=shape.workers, **options))
        return made

    def __str__(self) -> str:
        return f"{self.name}, {self.length} samples, {self.epochs} epochs, {self.rest}"


Rows = list[tuple[int, Any]]
"""Samples: their numbers, and what was drawn for each."""


def rows(batch: Any) -> Rows:
    if isinstance(batch, dict):
        batch = batch["i"]
    if isinstance(batch, list | tuple):
        return list(zip(batch[0].tolist(), map(tuple, batch[1].tolist()), strict=True))
    return [(each, None) for each in batch.tolist()]


def steps(loaders: list[ResumableDataLoader], epochs: int) -> Iterator[tuple[int, list[Rows]]]:
    """What the ranks get in each step, with the epoch."""
    while (epoch := loaders[0].epoch) < epochs:
        iterators = [iter(loader) for loader in loaders]
        while True:
            batches = [next(each, None) for each in iterators]
            if all(batch is None for batch in batches):
                break
            yield epoch, [[] if batch is None else rows(batch) for batch in batches]


class Killer:
    """Kills this process and its workers where the seed says."""

    def __init__(self, seed: str, *, armed: bool) -> None:
        draw = random.Random(seed)
        self.at, self.where = draw.randint(1, 10), draw.choice(["step", "writing", "written"])
        self.armed = armed

    def pass_by(self, where: str) -> None:
        self.at -= where == self.where
        if self.armed and not self.at:
            os.killpg(0, signal.SIGKILL)


def train(case: Case, start: int, folder: Path, *, armed: bool) -> None:
    """One start: goes on with what is committed, and commits."""
    saved, killer = folder / "saved.pt", Killer(f"{case.seed}-{start}", armed=armed)
    often, shape = random.Random(f"{case.seed}:{start}"), case.shape(start)
    loaders, used = case.loaders(shape, folder), []
    if saved.exists():
        states, used = torch.load(saved, weights_only=True)
        for rank, loader in enumerate(loaders):
            load_data_state(loader, states[0][0], states[rank][1] if rank < len(states) else None)
    for epoch, batches in steps(loaders, case.epochs):
        used.append((epoch, shape.batch * shape.world, batches))
        killer.pass_by("step")
        if len({loader.epoch for loader in loaders}) > 1 or often.random() < 0.4:
            continue
        torch.save(([tuple(data_state(loader)) for loader in loaders], used), f"{saved}.new")
        killer.pass_by("writing")
        os.replace(f"{saved}.new", saved)
        killer.pass_by("written")
    torch.save(used, folder / "used.pt")


def run(seed: int, folder: Path, kills: int = 6) -> str:
    """A job with its kills; returns what happened, raises AssertionError if a sample was lost or repeated."""
    case, draw, killed = Case(seed, kills), random.Random(-1 - seed), 0
    for start in count():
        armed = start < case.kills
        after = draw.uniform(0.0, 0.4) if armed and draw.random() < 0.25 else None
        code = forked(lambda start=start, armed=armed: train(case, start, folder, armed=armed), after)
        killed += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), f"seed {seed}: {case}: start {start}, {case.shape(start)}: exit {code}"
        if code == 0:
            break
    used = torch.load(folder / "used.pt", weights_only=True)
    check(case, used, folder)
    return f"seed {seed}: {case}: {killed} kills, {len(used)} steps"


def check(case: Case, used: list[Any], folder: Path) -> None:
    """Compare with a job that was never interrupted."""
    shape = case.first if case.kind.fixed else Shape(1, 0, 1)
    whole = folder / "whole.pt"

    def uninterrupted() -> None:
        case.rest = case.rest if case.kind.fixed else "uneven"
        torch.save([each for each in steps(case.loaders(shape, folder), case.epochs)], whole)

    assert forked(uninterrupted) == 0
    expected: list[Any] = torch.load(whole, weights_only=True)
    for epoch in range(case.epochs):
        there = [batches for number, batches in expected if number == epoch]
        got = [batches for number, _, batches in used if number == epoch]
        width = next((wide for number, wide, _ in reversed(used) if number == epoch), 0)
        flat = in_order if case.kind.batched else _one_after_the_other
        everything = [row for batches in there for row in flat(batches)]
        if case.kind.once:
            ids = Counter(row[0] for row in everything)
            assert set(ids.values()) <= {1} and set(ids) == set(range(len(ids))), f"{case}: the job itself: {ids}"
            assert len(ids) >= case.length
        where = f"seed {case.seed}: {case}: epoch {epoch}"
        if case.kind.fixed:
            for rank in range(shape.world):
                mine, theirs = ([row for batches in each for row in batches[rank]] for each in (got, there))
                assert mine == theirs, f"{where}, rank {rank}, {shape}: {told(mine, theirs)}"
        else:
            compare([row for batches in got for row in flat(batches)], everything, width, case.rest, where)


def compare(seen: Rows, expected: Rows, width: int, rest: str, where: str) -> None:
    """By the rule for the end of an epoch."""
    length = len(expected)
    if rest == "drop":
        assert seen == expected[: len(seen)], f"{where}: {told(seen, expected)}"
        assert length - len(seen) < WIDEST, f"{where}: {told(seen, expected)}"
        return
    assert seen[:length] == expected, f"{where}: {told(seen, expected)}"
    assert len(seen) - length < (1 if rest == "uneven" else max(width, 1)), f"{where}: {told(seen, expected)}"
    assert {row[0] for row in seen[length:]} <= {row[0] for row in expected}, where


def _one_after_the_other(batches: list[Rows]) -> Rows:
    return [row for batch in batches for row in batch]


def told(seen: Rows, expected: Rows) -> str:
    """How they differ, in a line."""
    first = next((i for i, pair in enumerate(zip(seen, expected, strict=False)) if pair[0] != pair[1]), "none")
    return f"{len(seen)} samples instead of {len(expected)}, the first other one at {first}"


def main(first: int, end: int, kills: int = 6) -> None:
    """Run the jobs of some numbers; stops at the first that fails."""
    began = time.monotonic()
    for seed in range(first, end):
        with tempfile.TemporaryDirectory(prefix="fuzz-data-") as folder:
            start = time.monotonic()
            print(f"{run(seed, Path(folder), kills)}, {time.monotonic() - start:.1f} s", flush=True)
    print(f"{end - first} jobs in {time.monotonic() - began:.0f} s: each sample once", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
