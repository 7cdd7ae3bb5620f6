"""Random states of ranks: equal ones are never refused; of unlike ones each rank loads its own, or they are refused."""

import os
from pathlib import Path

import pytest

from tests.faults.conftest import Jobs, new_job  # noqa: F401 (a fixture)
from tests.faults.jobs import Job

PROGRAM = {"program": str(Path(__file__).with_name("saved_states.py")), "FASTCKPT_PRELOAD": "auto"}
COUNT = int(os.environ.get("FASTCKPT_FUZZ_STATES", "300"))
FEW = 15


@pytest.mark.parametrize(
    "count", [pytest.param(FEW, id="some"), pytest.param(COUNT, marks=pytest.mark.campaign, id="many")]
)
def test_each_rank_has_its_own_again_or_is_refused(new_job: Jobs, count: int):  # noqa: F811
    for seed in range(count // FEW):
        saved_states_come_back(new_job(f"seed {seed}"), seed, FEW)


def saved_states_come_back(job: Job, seed: int, count: int) -> None:
    job.run("--steps", str(count), "--seed", str(seed), **PROGRAM)
    one, other = ([line for line in job.log(rank) if "case" in line] for rank in range(2))
    for way in ("ddp", "lightning", "shards", "dcp", "framework"):
        pairs = [(each, second) for each, second in zip(one, other, strict=True) if each["way"] == way]
        came = [(each["change"], each["came"], second["came"]) for each, second in pairs]
        assert len(came) == count and not [each for each in came if "OTHER" in each], (way, came)
        assert {each[1:] for each in came if each[0] == "equal"} == {("as it was", "as it was")}, (way, came)
        may_refuse = {("refused", "refused")} if way in ("dcp", "framework") else set()
        assert {each[1:] for each in came} == {("as it was", "as it was")} | may_refuse, (way, came)
