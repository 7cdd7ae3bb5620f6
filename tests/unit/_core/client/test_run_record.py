"""The kills of a run that `fastckpt prove` tries, by the steps of the script."""

from pathlib import Path

import torch

from fastckpt._core.client import run_record
from fastckpt._core.config import RankInfo
from fastckpt._core.policy.planned_kills import BETWEEN, PlannedKill
from fastckpt._core.report.kill_notes import made, write_plan
from tests.unit._core.memory.conftest import killed


def train(folder: Path) -> None:
    """Train with two optimizers, and write down each step that the script has come to."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight]) for weight in weights]
    run_record.begin(folder, str(folder), RankInfo(), dict)
    for step in range(1, 9):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.ones(2)
            optimizer.step()
        run_record.reach(step)
        (folder / "reached").write_text(str(step))


def test_a_kill_between_steps_comes_in_the_step_of_the_script(tmp_path: Path) -> None:
    kill = PlannedKill(1, BETWEEN, 0, 4)
    write_plan(tmp_path, str(tmp_path), [kill])
    killed(lambda: train(tmp_path))
    note = made(tmp_path, kill)
    assert (tmp_path / "reached").read_text() == "3" and note is not None and note["step"] == 4
