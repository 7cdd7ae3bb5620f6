"""Go on from a checkpoint with Lightning alone, then save with it: no process of this has fastckpt."""

import argparse
import sys
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.e2e.lightning.training import Module, trainer_for


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("load")
    parser.add_argument("save", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    model = ModelCheckpoint(args.save.parent, filename="other", every_n_train_steps=10**9)
    trainer = trainer_for(args.steps, model, strategy="ddp", use_distributed_sampler=False)
    trainer.fit(Module(), ckpt_path=args.load)
    trainer.save_checkpoint(args.save)
    assert not any(name.partition(".")[0] == "fastckpt" for name in sys.modules)


if __name__ == "__main__":
    main()
