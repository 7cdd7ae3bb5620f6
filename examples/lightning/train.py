"""A tiny training with Lightning that goes on where it was killed: fastckpt-run --nproc_per_node=2 train.py"""

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

from fastckpt.data import ResumableDataLoader
from fastckpt.lightning import NEWEST, FastCheckpointIO, FastDDPStrategy, MemoryCheckpoint


class Classifier(LightningModule):
    """Learns the sign of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        self.loss = loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.global_step % 10 == 9:
            self.print(f"step {self.global_step + 1}: loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--checkpoint-dir", default="checkpoints")
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()

seed_everything(0, verbose=False)
inputs = torch.randn(256, 16)
loader = ResumableDataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=8, shuffle=True)
trainer = Trainer(
    max_steps=args.steps,
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=FastDDPStrategy(),
    plugins=[FastCheckpointIO(args.checkpoint_dir)],
    callbacks=[
        MemoryCheckpoint(),
        ModelCheckpoint(args.checkpoint_dir, "{step}", every_n_train_steps=20, save_top_k=-1),
    ],
    use_distributed_sampler=False,  # the loader gives each rank its own samples, and goes on where it was
    logger=False,
    enable_progress_bar=False,
)
model = Classifier()
trainer.fit(model, loader, ckpt_path=NEWEST)
if not hasattr(model, "loss"):
    trainer.print(f"all {args.steps} steps were done before: nothing is trained")
