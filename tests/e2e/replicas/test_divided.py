"""Frameworks that save an optimizer's state from one rank refuse one that is divided over the ranks, by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import run_forked

PROGRAM = Path(__file__).with_name("divided.py")
NAMES = {
    "by_accelerate": "optimizer.0.",
    "by_deepspeed": "optimizer.0.",
    "by_trainer": "optimizer.0.",
    "by_dcp": "weight",
    "by_hsdp": "model.weight (shard of rank 0)",
}


@pytest.mark.usefixtures("forked_launchers")
def test_what_no_file_has_a_place_for_is_refused_on_all_ranks_and_the_rest_is_saved(tmp_path: Path):
    run_forked(tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=0", PROGRAM, tmp_path)
    said: list[dict[str, Any]] = [json.loads((tmp_path / f"said.{rank}").read_text()) for rank in range(2)]
    for each in said:
        for way, name in NAMES.items():
            assert each[f"{way}, equal"] == "True"
            assert each[f"{way}, unlike"].startswith(f"ranks have unlike {name}")
            assert "use fastckpt.Checkpointer" in each[f"{way}, unlike"]
