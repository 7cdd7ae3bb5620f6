"""Log lines of restarted workers of torchrun that find addresses of dead ranks in its store."""

import os
import subprocess
import sys
from datetime import timedelta

import torch.distributed as dist

ROUND = """
import sys
from datetime import timedelta
import torch.distributed as dist
import fastckpt.ddp
dist.init_process_group("gloo", timeout=timedelta(seconds=3 if sys.argv[1:] else 60))
"""


def test_a_worker_that_finds_addresses_of_dead_ranks_logs_cause_and_remedy() -> None:
    """It connects to nobody, or waits for them: that is for their ports to say."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    shape = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torchruns = {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}

    def start(rank: int, restart: int, *arguments: str) -> subprocess.Popen[str]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(restart)}
        command = [sys.executable, "-c", ROUND, *arguments]
        return subprocess.Popen(command, env=os.environ | shape | torchruns | place, stderr=subprocess.PIPE, text=True)

    first = [start(rank, 0) for rank in (0, 1)]
    said = [each.communicate(timeout=120)[1] for each in first]
    assert [each.returncode for each in first] == [0, 0], said
    assert not any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in text for text in said)
    alone = start(0, 1, "hurry")
    text = alone.communicate(timeout=120)[1]
    assert alone.returncode == 1 and "Gloo connectFullMesh failed" in text
    assert "gloo could not connect the workers. torchrun keeps its store while it restarts workers" in text
    assert "(restart 1)" in text and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
