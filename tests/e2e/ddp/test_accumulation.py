"""Loops in which each micro-batch is a step, ended anywhere: each sample counts once, with equal weights."""

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastckpt import Checkpointer
from fastckpt.data import ResumableDataLoader

EPOCHS = 2


class Stopped(Exception):
    """The job ends here, with what was saved by then."""


class Model(nn.Module):
    """Dropout draws, Python's generator draws, and a buffer counts what the weights have learned from."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.dropout = nn.Linear(4, 2), nn.Dropout(0.3)
        self.register_buffer("learned", torch.zeros(samples))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        inputs = batch[:, None].float().expand(-1, 4) * random.uniform(0.5, 1.5)
        return self.dropout(self.linear(inputs)).square().mean()


class Loop:
    """A job with ``accumulation`` micro-batches an update, of which some are skipped as GradScaler does it."""

    def __init__(self, samples: int, accumulation: int, kind: str, skips: set[int]) -> None:
        self.samples, self.accumulation, self.kind, self.skips = samples, accumulation, kind, skips

    def run(self, directory: Path, stop: int | None, **options: Any) -> list[torch.Tensor] | None:
        """The weights at the end; None if it was ended before, after so many micro-batches."""
        model = Model(self.samples)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = ResumableDataLoader(range(self.samples), 2, True, accumulate=self.accumulation)
        torch.manual_seed(5)
        random.seed(5)
        options = {"every": 1, **options}
        with (
            contextlib.suppress(Stopped),
            Checkpointer(directory, model=model, optimizer=optimizer, data=loader, **options) as checkpointer,
        ):
            step, done = checkpointer.resume(), 0
            pending: list[torch.Tensor] = []
            for _ in range(loader.epoch, EPOCHS):
                for batch in loader:
                    step, done = step + 1, done + 1
                    pending.append(batch)
                    model(batch).backward()
                    ends = loader.epoch == EPOCHS - 1 and len(loader) - step % len(loader) == len(loader)
                    if step % self.accumulation == 0 or (ends and self.kind == "to the end"):
                        if step not in self.skips:
                            optimizer.step()
                            for each in pending:
                                model.learned[each] += 1
                        pending = []
                        optimizer.zero_grad()
                    checkpointer.step(step)
                    if done == stop:
                        raise Stopped
            return [tensor.clone() for tensor in model.state_dict().values()]
        return None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 9))])
@pytest.mark.parametrize("kind", ["to the end", "across epochs"])
def test_a_job_that_accumulates_gradients_and_is_ended_anywhere_resumes_bit_for_bit(
    tmp_path: Path, seed: int, kind: str
):
    rng = random.Random(f"{seed} {kind}")
    samples, accumulation = 2 * rng.randint(6, 20), rng.randint(2, 5)
    skips = {step * accumulation for step in range(1, 20) if rng.random() < 0.15}
    loop = Loop(samples, accumulation, kind, skips)
    expected = loop.run(tmp_path / "whole", None, every=1000)
    assert expected is not None
    weights, launches = None, 0
    while weights is None:
        launches += 1
        weights = loop.run(tmp_path / "ended", rng.randint(1, 2 * accumulation + 3), every=rng.choice([1, 2, 3]))
        assert launches < 100
    assert launches > 1
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
