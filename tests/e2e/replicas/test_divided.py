"""Frameworks that save an optimizer's state from one rank refuse one that is divided over the ranks, by name."""

import json
from pathlib import Path

import pytest

from tests.faults.jobs import run_forked

PROGRAM = Path(__file__).with_name("divided.py")
FRAMEWORKS = dict.fromkeys(("by_accelerate", "by_deepspeed", "by_trainer"), "optimizer.0.")


@pytest.mark.usefixtures("forked_launchers")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param({"by_dcp": "weight", "by_hsdp": "model.weight (shard of rank 0)"}, id="torch"),
        pytest.param(FRAMEWORKS, id="frameworks", marks=pytest.mark.campaign),
    ],
)
def test_what_no_file_has_a_place_for_is_refused_on_all_ranks_and_the_rest_is_saved(
    tmp_path: Path, names: dict[str, str]
):
    run_forked(tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=0", PROGRAM, tmp_path, *names)
    for rank in range(2):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        for way, name in names.items():
            assert said[f"{way}, equal"] == "True"
            assert said[f"{way}, unlike"].startswith(f"ranks have unlike {name}")
            assert "use fastckpt.Checkpointer" in said[f"{way}, unlike"]
