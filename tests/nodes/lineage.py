"""The line of states that a job has come by, by what its workers have loaded and saved, and what is durable of it."""

import hashlib
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.nodes.recovery import Line


@dataclass(frozen=True)
class Run:
    """What one worker, which logs digests, has loaded and saved.

    Attributes:
        until: When it has logged its last line.
        step: The step that it has loaded; 0 for a fresh start.
        digest: Of what it has loaded.
        saved: Digests by step.
    """

    until: float
    step: int
    digest: str
    saved: dict[int, str]


def runs_in(log: Collection[Line]) -> Iterator[Run]:
    """The runs of a host, without those that ended before they had loaded."""
    numbered = itertools.accumulate(log, lambda count, line: count + (line["what"] == "started"), initial=0)
    for _, pairs in itertools.groupby(zip([*numbered][1:], log, strict=True), lambda pair: pair[0]):
        lines = [line for _, line in pairs]
        if loaded := next((line for line in lines if line["what"] == "loaded"), None):
            saved = {line["step"]: line["digest"] for line in lines if line["what"] == "saving"}
            yield Run(lines[-1]["at"], loaded["step"], loaded["digest"], saved)


def line_of(runs: Collection[Run]) -> dict[int, str]:
    """The digests, by step, of the line that the last run ends; each run has to go on from what another has saved."""
    saved = {(step, digest): run for run in runs for step, digest in run.saved.items()}
    for run in runs:
        assert not run.step or (run.step, run.digest) in saved, f"step {run.step} was loaded, and never saved like that"
    run, found = max(runs, key=lambda run: run.until), dict[int, str]()
    found |= run.saved
    while run.step:
        step = run.step
        run = saved[step, run.digest]
        found |= {each: digest for each, digest in run.saved.items() if each <= step}
    return found


def durable_in(storage: Path) -> dict[int, str]:
    """The digests, by step, of the checkpoints in a directory; as `Training.digest` makes them."""
    found = {}
    for path in storage.glob("checkpoint-*"):
        state = torch.load(path / "model.pt", weights_only=True)
        digest, own = hashlib.sha256(), state["optimizer"]["state"]
        for tensor in [*state["model"].values(), *(each for number in sorted(own) for each in own[number].values())]:
            digest.update(tensor.numpy().tobytes())
        found[state["step"]] = digest.hexdigest()
    return found
