"""Real text as bytes, and shuffled batches of it that continue where a checkpoint left them."""

import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def read_text(data_dir: str = "") -> bytes:
    """All files under ``data_dir``, or Python's standard library, in an order that never changes."""
    root = Path(data_dir or sysconfig.get_paths()["stdlib"])
    ending, left_out = ("", set()) if data_dir else (".py", _NOT_LIBRARY)
    files = sorted(path for path in _files(root, left_out) if path.name.endswith(ending) and path.is_file())
    # The tail is kept for validation; mixing the files makes it resemble the rest.
    random.Random(0).shuffle(files)
    return b"\n".join(path.read_bytes() for path in files)


def _files(root: Path, left_out: set[str]) -> Iterator[Path]:
    """All files below ``root``, without looking into folders of these names: each restart reads the text again."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        yield from (Path(folder, name) for name in names)


def split(text: bytes, block_size: int) -> tuple[Tensor, Tensor]:
    """Tokens to train on, and the last twentieth to validate with."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    cut = len(tokens) - len(tokens) // 20
    if len(tokens) - cut <= block_size:
        raise ValueError(f"{len(text)} bytes of text are too few; a block of {block_size} needs {20 * block_size + 20}")
    return tokens[:cut], tokens[cut:]


def windows(tokens: Tensor, starts: Tensor, block_size: int) -> Batch:
    """Return for each start a block of tokens, and the block one token further: what should be predicted."""
    block = tokens[starts[:, None] + torch.arange(block_size + 1)].long()
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def validation_batch(tokens: Tensor, block_size: int, size: int, rank: int, world_size: int) -> Batch:
    """This rank's part of ``size * world_size`` blocks, spread evenly over ``tokens``."""
    starts = torch.linspace(0, len(tokens) - block_size - 1, size * world_size, dtype=torch.float64).long()
    return windows(tokens, starts[rank::world_size], block_size)


class ShuffledBatches:
    """Batches without end: each epoch takes every block once, in an order of its own.

    The position counts blocks taken by all ranks together: it is the same on every rank, and it still
    holds when training resumes with another number of ranks.
    """

    def __init__(
        self,
        tokens: Tensor,
        block_size: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        self._tokens, self._block_size, self._batch_size = tokens, block_size, batch_size
        self._rank, self._seed = rank, seed
        self._together = batch_size * world_size
        self._blocks = (len(tokens) - 1) // block_size
        if self._blocks < self._together:
            raise ValueError(f"the text has {self._blocks} blocks; one step takes {self._together}: give more text")
        self._start_epoch(epoch=0, taken=0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that an epoch takes; blocks too few for another step are left out."""
        return self._blocks // self._together

    def peek(self) -> Batch:
        """The batch that `take` returns next."""
        first = self._taken + self._rank * self._batch_size
        blocks = self._order[first : first + self._batch_size]
        return windows(self._tokens, blocks * self._block_size, self._block_size)

    def take(self) -> Batch:
        """This rank's next batch."""
        batch = self.peek()
        self._taken += self._together
        self._end_epoch_if_short()
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next batch."""
        return {"epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken."""
        self._start_epoch(state["epoch"], state["taken"])
        self._end_epoch_if_short()

    def _end_epoch_if_short(self) -> None:
        if self._taken + self._together > self._blocks:
            self._start_epoch(self._epoch + 1, taken=0)

    def _start_epoch(self, epoch: int, taken: int) -> None:
        self._epoch, self._taken = epoch, taken
        generator = torch.Generator().manual_seed(self._seed + epoch)
        self._order = torch.randperm(self._blocks, generator=generator)
