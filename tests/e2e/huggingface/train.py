"""The training of stock.py by our Trainer, in which faults may be injected."""

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer

sys.path.insert(0, str(Path(__file__).parents[3]))
from fastckpt._core.snapshot import mutation_check
from fastckpt.huggingface import FastCheckpointMixin, FastCheckpointTrainer, get_last_checkpoint
from tests.e2e.huggingface.stock import make_trainer, parse_arguments, run
from tests.faults.faults import inject_requested_faults


class OwnTrainer(FastCheckpointMixin, Trainer):
    """A user's: it writes files that nobody else knows."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            Path(output_dir, "own.txt").write_text(f"step {self.state.global_step}")


def kind_of(args: argparse.Namespace) -> tuple[type, dict[str, Any]]:
    """The class of a trainer, and what its constructor takes beside Trainer's arguments."""
    kinds = {"fast": FastCheckpointTrainer, "own": OwnTrainer}
    return kinds[args.kind], {"save_memory_steps": args.memory, "checkpoint_options": {"overlap": args.overlap}}


def trainer_of(folder: Path, *script: str, ours: bool = True) -> Any:
    options = ["--out", str(folder), "--checkpoint-dir", str(folder), "--memory", "1", "--steps", "6", "--disk", "3"]
    args = parse_arguments(*options, *script)
    kind, more = kind_of(args) if ours else (Trainer, {})
    return make_trainer(args, kind, **more)


def trained(folder: Path, *script: str, ours: bool = True, resume: str | bool = False) -> Any:
    trainer = trainer_of(folder, *script, ours=ours)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    args = parse_arguments()

    def before(rank: int) -> None:
        inject_requested_faults(rank, args.out)
        if args.overlap:
            mutation_check.WORTH = 1  # the largest storage has some KB
        if args.resume == "last":
            args.resume = get_last_checkpoint(args.checkpoint_dir) or "none"

    kind, options = kind_of(args)
    run(args, kind, before, **options)


if __name__ == "__main__":
    main()
