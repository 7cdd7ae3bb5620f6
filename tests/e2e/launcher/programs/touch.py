"""Leave a file named by the rank, with the environment in it; look out for what a launcher must set."""

import argparse
import json
import os
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--fail", action="store_true")
parser.add_argument("--folder", default=os.environ["JOB_FOLDER"])
arguments, rest = parser.parse_known_args()

REQUIRED = (
    "LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_USE_AGENT_STORE TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS TORCHELASTIC_ERROR_FILE"
)
missing = [name for name in REQUIRED.split() if name not in os.environ]
assert not missing, missing
if arguments.fail:
    raise RuntimeError("told to fail")
told = {"environment": dict(os.environ), "arguments": rest, "argv": sys.argv[1:]}
Path(arguments.folder, f"rank.{os.environ['RANK']}").write_text(json.dumps(told))
