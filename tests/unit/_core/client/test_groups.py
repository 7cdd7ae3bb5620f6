"""Process groups that a job of torchrun's forms one after another, and checkpointers made before and after them."""

from pathlib import Path

from tests.support.forked_programs import run

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from fastckpt.ddp import DdpCheckpointer

folder, rank = sys.argv[1], int(sys.argv[2])
os.environ.update(
    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
    MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_RUN_ID="none",
    TORCHELASTIC_USE_AGENT_STORE="True",
)
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


def test_ranks_find_the_saver_in_each_group(tmp_path: Path, forked_launchers: None) -> None:
    found = run(tmp_path, PROGRAM, [(tmp_path, rank) for rank in (0, 1)])
    assert [code for code, _ in found] == [0, 0], found
    assert len(list(tmp_path.glob("[01]/checkpoint-1/manifest.json"))) == 2
