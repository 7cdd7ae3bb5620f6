"""Go on from a checkpoint with accelerate alone, then save with it: no process of this has fastckpt."""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.e2e.accelerate.training import Training, advance, batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("load")
    parser.add_argument("save", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--hooks", action="store_true")
    args = parser.parse_args()
    training = Training(stateful=args.stateful, hooks=args.hooks)
    training.accelerator.load_state(args.load)
    for inputs, targets in batches(training, training.count.steps, args.stateful):
        advance(training, inputs, targets)
        if training.count.steps >= args.steps:  # before it fetches another batch, which would count as taken
            break
    training.accelerator.save_state(str(args.save))
    assert not any(name.partition(".")[0] == "fastckpt" for name in sys.modules)
    dist.barrier()
    training.accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
