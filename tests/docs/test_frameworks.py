"""The blocks of docs/guides/adopt.md for frameworks train, and what they save is on storage."""

import os
import re
from pathlib import Path

import pytest

from tests.support import launchers


@pytest.mark.frameworks
def test_each_framework_of_the_page_trains_and_its_last_step_is_on_storage(tmp_path: Path):
    with (tmp_path / "log").open("wb") as output:
        options = ["--nproc-per-node", "1", "--log-dir", str(tmp_path / "logs")]
        job = ["-m", "fastckpt_run", *options, "-m", "tests.docs.framework_job", str(tmp_path)]
        code = launchers.start(job, dict(os.environ), output.fileno()).wait(280)
    printed = (tmp_path / "log").read_text(errors="replace")
    assert code == 0, printed[-6000:]
    assert len(re.findall("is done", printed)) == 4
    on_storage = {
        path.parent.parent.parent.name: path.parent.name for path in tmp_path.glob("*/checkpoints/*10*/manifest.json")
    }
    assert {"deepspeed", "huggingface", "accelerate"} <= on_storage.keys(), on_storage
    assert list((tmp_path / "lightning/checkpoints").glob("*step=10*.ckpt"))
