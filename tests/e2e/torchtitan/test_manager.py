"""The manager of docs/guides/torchtitan.md, whose rank is killed: on a stand-in for torchtitan, which is not installed.

With torchtitan 0.3.0 itself it was run by hand (the page says how): its package needs an older `datasets` than others.
"""

from pathlib import Path

import torch.distributed.checkpoint as dcp

from tests.faults.jobs import run_forked

PROGRAM = Path(__file__).with_name("train.py")


def test_a_killed_rank_goes_on_from_memory_and_ends_with_the_same_weights(tmp_path: Path, forked_launchers: None):
    text = run_forked(tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=2", PROGRAM, tmp_path)
    assert text.count("goes on after step 6") == 2 and "resumed step 6 from memory" in text, text
    assert text.count("ends with the weights of a training that nothing befell") == 2, text
    last = tmp_path / "checkpoint/checkpoint-12"
    assert (last / ".metadata").is_file(), "deleted are older ones alone"
    metadata = dcp.FileSystemReader(last).read_metadata()
    assert {"train_state.step", "0.weight"} <= metadata.state_dict_metadata.keys(), "stock DCP reads it"
