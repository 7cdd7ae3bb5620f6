"""Models of pipeline stages are not taken for one model; replicas on meshes of their own are."""

import json
import os
import subprocess
import sys
from pathlib import Path

STAGES = Path(__file__).with_name("stages.py")


def test_what_would_come_back_as_another_ranks_is_refused_at_the_first_save(tmp_path: Path):
    launcher = [
        Path(sys.executable).with_name("fastckpt-run"),
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=0",
    ]
    environment = os.environ | {
        "PYTHONPATH": f"{STAGES.parents[2]}:{os.environ['PYTHONPATH']}",
        "TMPDIR": str(tmp_path),
    }
    subprocess.run([*launcher, STAGES, tmp_path], check=True, env=environment, timeout=240)
    for rank in (0, 1):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        for way in ("in_three_lines", "by_hand"):
            assert "params of rank 1 has other parameters than that of rank 0" in said[f"{way}, own names"]
            assert "model.0.weight of rank 0 is not that of rank 1" in said[f"{way}, equal names"]
            assert "pipeline stages" in said[f"{way}, equal names"]
            assert said[f"{way}, replicas"] == "resumed 1, equal: True"
