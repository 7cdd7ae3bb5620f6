"""The training job of tests/nodes, with its checkpoints, and its logs beside them, where a batch script wants them."""

import os
import runpy
import sys
from pathlib import Path

place = Path(os.environ["CHECKPOINT_DIR"]).absolute()
out = place.with_name(f"{place.name}.logs")
out.mkdir(parents=True, exist_ok=True)
sys.argv[1:1] = ["--checkpoint-dir", str(place), "--out", str(out)]
runpy.run_path(str(Path(__file__).parents[1] / "nodes/train.py"), run_name="__main__")
