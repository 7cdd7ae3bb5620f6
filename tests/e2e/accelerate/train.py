"""A small training with accelerate: DDP, dropout, AdamW, a scheduler; logs as tests/faults/train.py does."""

import argparse
import os
import signal
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from fastckpt._core.snapshot import mutation_check
from fastckpt.accelerate import AccelerateCheckpointer, StorageType

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.e2e.accelerate.training import Training, advance, batches
from tests.faults.diary import Log, digest, parser_of_all
from tests.faults.faults import inject_requested_faults

warnings.filterwarnings("ignore")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_all()
    parser.add_argument(
        "--stateful", action="store_true", help="with a loader that has a state, else batches are skipped"
    )
    parser.add_argument("--overlap", action="store_true", help="copy what the optimizer changes in the background")
    parser.add_argument("--hooks", action="store_true", help="weights are saved by a hook, as those of adapters are")
    parser.add_argument("--bin", action="store_true", help="weights in files of torch.save")
    parser.add_argument("--named", action="store_true", help="directories are called step_<n>")
    parser.add_argument("--wait", action="store_true", help="go on when a save to storage is durable")
    parser.add_argument("--resume-path", default="")
    parser.add_argument("--die", action="store_true", help="with the agent, after the last step")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    training = Training(stateful=args.stateful, hooks=args.hooks)
    rank = training.accelerator.process_index
    log = Log(args.out, rank)
    inject_requested_faults(rank, args.out)
    if args.overlap:
        mutation_check.WORTH = 1  # the largest storage has 800 bytes
    checkpointer = AccelerateCheckpointer(training.accelerator, args.checkpoint_dir, overlap=args.overlap)
    loaded = checkpointer.load_state(args.resume_path)
    step = training.count.steps
    start = [int(os.environ["FAULTS_LAUNCH"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    log(loaded=step, tier=checkpointer.loaded_from, pid=os.getpid(), start=start, said=loaded)
    pending = 0
    for inputs, targets in batches(training, step, args.stateful):
        if step >= args.steps:
            break
        step += 1
        loss = advance(training, inputs, targets)
        log(step=step, loss=loss.item().hex())
        if pending:
            log(saved=pending)
            pending = 0
        if step % args.memory == 0 or step % args.disk == 0:
            place = StorageType.MEMORY if step % args.disk else StorageType.DISK
            name = f"step_{step}" if args.named else ""
            result = checkpointer.save_state(step, place, name=name, safe_serialization=not args.bin)
            if result.pending:
                pending = step
            elif result.saved:
                log(saved=step)
            else:
                log(skipped=step, reason=result.reason)
            if args.wait and place is StorageType.DISK:
                checkpointer.wait_latest_checkpoint()
    dist.barrier()
    if args.die:
        checkpointer.wait_latest_checkpoint()
        dist.barrier()
        if rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    (args.out / f"end.{rank}").write_text(digest(training.state()))
    checkpointer.close()
    dist.barrier()
    training.accelerator.end_training()


if __name__ == "__main__":
    train(parse_arguments())
