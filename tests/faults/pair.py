"""An actor and a critic, each with a checkpointer of its own; a worker kills itself between the saves of one step.

``<out>/<rank>.jsonl`` has what each start resumed; what is restored is compared with what was saved.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from fastckpt.ddp import DdpCheckpointer, StorageType

KILLS = {7: "the first", 12: "the second"}
"""At which steps a worker dies when the actor has been saved, and the critic has not."""
LAST = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parts = {name: torch.zeros(1000) for name in ("actor", "critic")}
    both = {name: DdpCheckpointer(args.checkpoint_dir / name) for name in parts}
    loaded = {name: one.load_checkpoint() for name, one in both.items()}
    steps = {name: one.loaded_step for name, one in both.items()}
    for name, state in loaded.items():
        if state:
            parts[name] = state["weights"]
            assert torch.equal(parts[name], torch.full((1000,), float(steps[name]))), name
    with (args.out / f"{rank}.jsonl").open("a") as log:
        log.write(json.dumps(steps) + "\n")
    died = args.out / "died"
    for step in range(max(0, steps["actor"]) + 1, LAST + 1):
        for name, one in both.items():
            parts[name] += 1
            storage = StorageType.DISK if step % 5 == 0 else StorageType.MEMORY
            one.save_checkpoint(step, {"weights": parts[name]}, storage_type=storage)
            dist.barrier()
            if name == "actor" and rank == 1 and step in KILLS and not (mark := Path(f"{died}-{step}")).exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    for one in both.values():
        one.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
