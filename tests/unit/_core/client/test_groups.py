"""Process groups that a job of torchrun's forms one after another, and checkpointers made before and after them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from fastckpt.ddp import DdpCheckpointer

folder, rank = sys.argv[1], int(os.environ["RANK"])
before = DdpCheckpointer(f"{folder}/before")
for number in range(2):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{number}", rank=rank, world_size=2)
    checkpointer = DdpCheckpointer(f"{folder}/{number}")
    assert checkpointer.load_checkpoint() == {}
    assert checkpointer.save_checkpoint(1, {"a": torch.ones(3)})
    dist.barrier()
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()
before.close()
"""


def test_ranks_find_the_saver_in_each_group(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "--log-dir", tmp_path, program, tmp_path],
        env=variables,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("[01]/checkpoint-1/manifest.json"))) == 2
