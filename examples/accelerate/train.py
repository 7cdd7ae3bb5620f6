"""A tiny training with accelerate that goes on where it was killed: fastckpt-run --nproc_per_node=2 train.py"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastckpt.accelerate import AccelerateCheckpointer, StorageType

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--checkpoint-dir", default="checkpoints")
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()

torch.manual_seed(0)
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
)
inputs = torch.randn(256, 16)
targets = (inputs[:, 0] > 0).long()
# With a generator of its own the loader takes no random numbers from the training when it begins again.
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True, generator=torch.Generator())
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

checkpointer = AccelerateCheckpointer(accelerator, args.checkpoint_dir)
step = checkpointer.load_state()  # 0 if nothing was ever saved
epoch, done = divmod(step, len(loader))
if step >= args.steps:
    accelerator.print(f"all {args.steps} steps were done before: nothing is trained", flush=True)
while step < args.steps:
    loader.set_epoch(epoch)
    for batch, labels in accelerator.skip_first_batches(loader, done) if done else loader:
        step += 1
        loss = nn.functional.cross_entropy(model(batch), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        checkpointer.save_state(step, StorageType.DISK if step % 20 == 0 else StorageType.MEMORY)
        if step % 10 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if step == args.steps:
            break
    epoch, done = epoch + 1, 0

checkpointer.wait_latest_checkpoint()
checkpointer.close()
accelerator.wait_for_everyone()
accelerator.end_training()
