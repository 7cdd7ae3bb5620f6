"""The kills of a run that `fastckpt prove` tries, by the steps of the script."""

import signal
from pathlib import Path

from fastckpt._core.policy.planned_kills import BETWEEN, PlannedKill
from fastckpt._core.report.kill_notes import made, write_plan
from tests.support.forked_programs import run

TWO_OPTIMIZERS = """
import sys
from pathlib import Path
import torch
from fastckpt._core.client import run_record
from fastckpt._core.config import RankInfo

model = torch.nn.Linear(2, 2)
first, second = torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias])
run_record.begin(Path(sys.argv[1]), sys.argv[1], RankInfo.from_environment(), dict)
for step in range(1, 9):
    model(torch.ones(2)).sum().backward()
    first.step()
    second.step()
    run_record.reach(step)
    print(step, flush=True)
"""


def test_a_kill_between_steps_comes_in_the_step_of_the_script(tmp_path: Path, forked_launchers: None) -> None:
    kill = PlannedKill(1, BETWEEN, 0, 4)
    write_plan(tmp_path, str(tmp_path), [kill])
    [(code, said)] = run(tmp_path, TWO_OPTIMIZERS, [(tmp_path,)])
    assert code == -signal.SIGKILL, said
    note = made(tmp_path, kill)
    assert said.split() == ["1", "2", "3"] and note is not None and note["step"] == 4
