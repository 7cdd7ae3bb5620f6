"""A bit that flips in one rank is found, what was saved since then is not resumed, and the results are unchanged."""

import re
from pathlib import Path

from fastckpt._core.replicas.rank_differences import EVERY
from tests.faults.conftest import Jobs

PROGRAM = {"program": str(Path(__file__).with_name("flipped.py")), "FASTCKPT_PRELOAD": "auto"}


def test_a_flipped_bit_is_found_before_the_first_checkpoint_and_later_and_never_resumed(new_job: Jobs):
    whole = new_job("whole").run(ranks=3, **PROGRAM)
    job = new_job().run("--at", "25", "270", ranks=3, restarts=2, **PROGRAM)
    text = job.text()
    assert [line["loaded"] for line in job.log(0) if "loaded" in line] == [0, 0, 250], text
    assert job.ends() == whole.ends(), text
    first, second = sorted({int(step) for step in re.findall(r"differs? at step (\d+)", text)})
    assert first == 50 and 270 < second <= 270 + 2 * EVERY and " repeated, 2 restarts, " in text
    assert "(rank 1 on" in text, text
