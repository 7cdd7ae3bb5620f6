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


@pytest.mark.parametrize("way", [*RANKS])
def test_training_begins_afresh_after_a_flip_before_the_first_checkpoint(new_job: Jobs, way: str):
    whole = new_job("whole").run("--way", way, "--steps", "120", ranks=RANKS[way], **PROGRAM)
    script = ("--way", way, "--steps", "120", "--flips", "1", "--after", "25", "25")
    job = new_job().run(*script, ranks=RANKS[way], restarts=1, **PROGRAM)
    text = job.text()
    assert [line["loaded"] for line in job.log(0) if "loaded" in line] == [0, 0], text
    assert re.search("differs? at step 50", text) and " repeated, 1 restart, " in text
    assert job.ends() == whole.ends(), text


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", [*RANKS])
def test_fifty_flips_in_ten_thousand_steps_are_found_and_nothing_else(new_job: Jobs, way: str):
    whole, job = new_job("whole"), new_job()
    whole.deadline = job.deadline = 1800.0
    script = ("--way", way, "--steps", str(200 * SEEDS))
    whole.run(*script, ranks=RANKS[way], **PROGRAM)
    assert "unlike" not in whole.text() and len(whole.losses(0)) == 200 * SEEDS
    flips = ("--flips", str(SEEDS), "--after", "1", "200", "--seed", "100")
    job.run(*script, *flips, ranks=RANKS[way], restarts=SEEDS, **PROGRAM)
    flipped = [line["flipped"] for line in job.log(1) if "flipped" in line]
    assert len(flipped) == SEEDS == len([line for line in job.log(0) if "loaded" in line]) - 1, job.text()
    assert job.ends() == whole.ends(), job.text()
