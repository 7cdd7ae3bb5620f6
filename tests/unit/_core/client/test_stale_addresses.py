"""Log lines of restarted workers of torchrun that find addresses of dead ranks in its store."""

import os
import subprocess
import sys
from datetime import timedelta
from multiprocessing import get_context

import torch.distributed as dist

ROUND = """
import sys
from datetime import timedelta
import torch.distributed as dist
import fastckpt.ddp
dist.init_process_group("gloo", timeout=timedelta(seconds=2 if sys.argv[1:] else 60))
"""


def test_a_worker_that_finds_addresses_of_dead_ranks_logs_cause_and_remedy() -> None:
    """It connects to nobody, or waits for them: that is for their ports to say."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    shape = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shape |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}

    def first_rank(restart: int, *arguments: str) -> tuple[int, str]:
        place = {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(restart)}
        command = [sys.executable, "-c", ROUND, *arguments]
        environment = os.environ | shape | place
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stderr

    def second_rank() -> None:
        os.environ |= shape | {"RANK": "1"}
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))

    second = get_context("fork").Process(target=second_rank)
    second.start()
    code, text = first_rank(0)
    second.join(60)
    assert (code, second.exitcode) == (0, 0) and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in text
    code, text = first_rank(1, "hurry")
    assert code == 1 and "Gloo connectFullMesh failed" in text
    assert "gloo could not connect the workers. torchrun keeps its store while it restarts workers" in text
    assert "(restart 1)" in text and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
