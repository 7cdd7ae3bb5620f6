"""A bit that flips in one rank is found, what was saved since then is not resumed, and the results are unchanged."""

import re
from pathlib import Path

import pytest

from fastckpt._core.replicas.rank_differences import EVERY
from tests.faults.conftest import Jobs

PROGRAM = {"program": str(Path(__file__).with_name("flipped.py")), "FASTCKPT_PRELOAD": "auto"}
RANKS = {"ddp": 3, "hsdp": 4, "deepspeed": 2}
SEEDS = 50


@pytest.mark.parametrize("way", [*RANKS])
def test_a_flipped_bit_is_found_and_never_resumed(new_job: Jobs, way: str):
    whole = new_job("whole").run("--way", way, ranks=RANKS[way], **PROGRAM)
    job = new_job().run("--way", way, "--flips", "1", ranks=RANKS[way], restarts=1, **PROGRAM)
    text = job.text()
    assert [line["loaded"] for line in job.log(0) if "loaded" in line] == [0, 250], text
    assert job.ends() == whole.ends(), text
    (found,) = {int(step) for step in re.findall(r"differs? at step (\d+)", text)}
    assert 270 < found <= 270 + 2 * EVERY
    assert ("(rank 1 on" in text) == (way == "ddp"), text


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", [*RANKS])
def test_fifty_flips_are_found_and_never_resumed(new_job: Jobs, way: str):
    whole = new_job("whole").run("--way", way, ranks=RANKS[way], **PROGRAM)
    script = ("--way", way, "--flips", str(SEEDS), "--after", "170", "--seed", "100")
    job = new_job().run(*script, ranks=RANKS[way], restarts=SEEDS, **PROGRAM)
    flipped = [line["flipped"] for line in job.log(1) if "flipped" in line]
    assert len(flipped) == SEEDS == len([line for line in job.log(0) if "loaded" in line]) - 1, job.text()
    assert job.ends() == whole.ends(), job.text()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", [*RANKS])
def test_ten_thousand_steps_raise_no_false_alarm(new_job: Jobs, way: str):
    job = new_job().run("--way", way, "--steps", "10000", ranks=RANKS[way], **PROGRAM)
    assert "unlike" not in job.text() and len(job.losses(0)) == 10_000
