"""Counts the calls of a resume from storage to the file system of the checkpoint directory, by ranks and nodes.

    python benchmarks/resume_calls.py [--ranks 4 8 16] [--nodes 1 2]

Real launches on this host, each agent with memory of its own; the directory has four checkpoints. Counted are calls of
all ranks that name a path in the directory, from the construction of the checkpointer to the end of the load.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.ddp.resuming import CHECKPOINTS, calls_of_a_resume


def main() -> None:
    """Print a line for each shape of a job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    print(f"C = {CHECKPOINTS} checkpoints\n{'W':>4}{'N':>4}{'all':>8}{'rank 0':>8}{'any other':>11}{'manifests':>11}")
    for ranks in given.ranks:
        for nodes in given.nodes:
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
                os.environ["FASTCKPT_SHM_DIR"] = memory
                calls = calls_of_a_resume(Path(folder), nodes, ranks // nodes)
            first, *others = calls.of_rank
            print(f"{ranks:4}{nodes:4}{first + sum(others):8}{first:8}{max(others):11}{sum(calls.manifests):11}")


if __name__ == "__main__":
    main()
