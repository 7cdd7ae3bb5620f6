"""DDP program with the loop API: `fastckpt.Checkpointer` with a `ResumableDataLoader`, over gloo.

Each rank appends a line of JSON for each start and step to ``<out>/log.<rank>``, with the samples that the step used,
and at the end writes the digest of its weights, its optimizer and its random generator to ``<out>/end.<rank>``.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, default_collate

from fastckpt import Checkpointer
from fastckpt._core.session import SaveResult, StorageType
from fastckpt._core.snapshot import mutation_check
from fastckpt.data import ResumableDataLoader
from fastckpt.ddp import DdpCheckpointer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults.diary import Log, digest


class Samples(torch.utils.data.Dataset[tuple[int, torch.Tensor, int]]):
    """Noise is added to each, so that the random numbers of samples count."""

    def __init__(self, count: int, noise: float) -> None:
        self._noise = noise
        generator = torch.Generator().manual_seed(5)
        self._inputs = torch.randn(count, 8, generator=generator)
        self._targets = torch.randint(4, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, self._inputs[index] + self._noise * torch.randn(8), int(self._targets[index])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--every", type=int, nargs=2, default=None, metavar=("MEMORY", "STORAGE"))
    parser.add_argument("--storage-seconds", type=float, default=0.0, help="persist so often, and note when")
    parser.add_argument("--torchdata", action="store_true", help="read with its StatefulDataLoader")
    parser.add_argument("--stream", action="store_true", help="read a shuffled stream of Hugging Face's")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in an update; each is a step")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="what each step takes beside its computation")
    parser.add_argument("--stop-at", type=int, default=0, help="train up to here, then wait to be ended")
    return parser.parse_args()


class Epochs:
    """Counts them, where the loader does not."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self._sampler = sampler
        self.epoch = 0

    def up_to(self, epochs: int) -> Iterator[int]:
        while self.epoch < epochs:
            self._sampler.set_epoch(self.epoch)
            yield self.epoch
            self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def stateful_loader(args: argparse.Namespace) -> tuple[Any, Epochs]:
    """As docs/guides/data.md says. Its workers draw other random numbers after a resume, so there is no noise."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Samples(args.samples, 0.0)
    sampler, generator = DistributedSampler(data, seed=3), torch.Generator()
    workers = args.loader_workers
    loader = StatefulDataLoader(data, args.batch, sampler=sampler, generator=generator, num_workers=workers)
    return loader, Epochs(sampler)


def streamed(args: argparse.Namespace) -> ResumableDataLoader:
    """A stream of Hugging Face's, whose state leaves out what its shuffle buffer holds."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    samples = Samples(args.samples, 0.1)
    stream = datasets.Dataset.from_dict({"i": list(range(args.samples))}).to_iterable_dataset(num_shards=4)
    mine = split_dataset_by_node(stream.shuffle(seed=3, buffer_size=20), dist.get_rank(), dist.get_world_size())

    def collate(rows: list[dict[str, int]]) -> Any:
        return default_collate([samples[row["i"]] for row in rows])

    return ResumableDataLoader(mine, args.batch, sharded=True, num_workers=args.loader_workers, collate_fn=collate)


def note_persists(checkpointer: DdpCheckpointer, log: Log) -> None:
    """Log each save that is to be persisted, once it is in memory, or about to be."""
    save = checkpointer.save_checkpoint

    def noting(step: int, *args: Any, storage_type: StorageType, **more: Any) -> SaveResult:
        result = save(step, *args, storage_type=storage_type, **more)
        if result and storage_type is StorageType.DISK:
            log(asked=step)
        return result

    checkpointer.save_checkpoint = noting  # type: ignore[method-assign]


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    log = Log(args.out, rank)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    others: dict[str, Any] = {}
    if args.torchdata:
        loader, others["epochs"] = stateful_loader(args)
    elif args.stream:
        loader = streamed(args)
    else:
        loader = ResumableDataLoader(
            Samples(args.samples, 0.1), args.batch, shuffle=True, seed=3, num_workers=args.loader_workers
        )
    torch.manual_seed(11 + rank)
    mutation_check.WORTH = 1  # states copied in the background are small here

    every = {"memory": args.every[0], "storage": args.every[1]} if args.every else "auto"
    if args.storage_seconds:
        every = {"memory": 1, "storage": timedelta(seconds=args.storage_seconds)}
    options = {"every": every, "others": others, "gradients": args.accumulate > 1}
    with Checkpointer(
        args.checkpoint_dir, model=ddp, optimizer=optimizer, scheduler=scheduler, data=loader, **options
    ) as checkpointer:
        note_persists(checkpointer._checkpointer, log)
        step = checkpointer.resume()
        start = [int(os.environ[name]) for name in ("FAULTS_LAUNCH", "TORCHELASTIC_RESTART_COUNT")]
        log(loaded=step, world=world, start=start, tier=checkpointer._checkpointer.loaded_from)
        for epoch in others["epochs"].up_to(args.epochs) if args.torchdata else range(loader.epoch, args.epochs):
            for indices, inputs, targets in loader:
                step += 1
                time.sleep(args.step_seconds)
                updates = step % args.accumulate == 0
                with nullcontext() if updates else ddp.no_sync():
                    loss = nn.functional.cross_entropy(ddp(inputs), targets)
                    (loss / args.accumulate).backward()
                if updates:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                log(step=step, loss=loss.item().hex(), samples=indices.tolist(), epoch=epoch)
                if checkpointer.step(step) is not None:
                    log(due=step)
                if 0 < args.stop_at <= step:
                    log(stopped=step)
                    time.sleep(600)
    state = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()]
    (args.out / f"end.{rank}").write_text(digest(state))
    assert not {"fastckpt.checkpointer.sharded_backend", "fastckpt.dcp"} & sys.modules.keys(), (
        "who has no shards pays for them"
    )


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
