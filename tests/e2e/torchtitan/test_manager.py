"""The manager of docs/guides/torchtitan.md, whose rank is killed: on a stand-in for torchtitan, which is not installed.

With torchtitan 0.3.0 itself it was run by hand (the page says how): its package needs an older `datasets` than others.
"""

import os
import re
from pathlib import Path

import torch.distributed.checkpoint as dcp

from tests.support import launchers


def launch(folder: Path, name: str, kill_at: int) -> str:
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        options = ["--nproc-per-node", "2", "--max-restarts", "2", "--log-dir", str(folder / "logs")]
        script = ["-m", "tests.e2e.torchtitan.train", str(folder / name), str(kill_at)]
        job = ["-m", "fastckpt_run", *options, *script]
        code = launchers.start(job, dict(os.environ), output.fileno()).wait(240)
    text = log.read_text(errors="replace")
    assert code == 0, text[-5000:]
    return text


def test_a_killed_rank_goes_on_from_memory_and_ends_with_the_same_weights(tmp_path: Path, forked_launchers: None):
    whole, killed = (launch(tmp_path, name, kill_at) for name, kill_at in [("whole", 0), ("killed", 7)])
    ends = [sorted(re.findall(r"rank \d ends with \w+", text)) for text in (whole, killed)]
    assert len(ends[0]) == 2 and ends[0] == ends[1]
    assert killed.count("goes on after step 6") == 2 and "resumed step 6 from memory" in killed
    folder = tmp_path / "killed/checkpoint"
    assert (folder / "checkpoint-12" / ".metadata").is_file(), "deleted are older ones alone"
    metadata = dcp.FileSystemReader(folder / "checkpoint-12").read_metadata()
    assert {"train_state.step", "0.weight"} <= metadata.state_dict_metadata.keys(), "stock DCP reads it"
