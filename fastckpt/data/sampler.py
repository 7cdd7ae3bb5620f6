"""A sampler that continues: DistributedSampler's arguments, and a position."""

import logging
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from fastckpt._core.arguments import public
from fastckpt._core.data.position import DataPosition, nothing_own, whole
from fastckpt._core.data.split import Remainder, Split, check_joined, rank_and_world
from fastckpt._core.error_codes import coded
from fastckpt.data.order import IndexOrder, Order
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

CHUNK = 1024
"""Indices looked up at once."""


class ResumableSampler(Sampler[int]):
    """Gives each rank its part of an epoch, from the position on.

    `ResumableDataLoader` moves the position. With a plain ``DataLoader``, call ``advance`` after each step.

    Args:
        dataset: Anything with a length.
        num_replicas: Ranks; default: those of torch.distributed, or of the launcher.
        rank: This rank; default likewise.
        shuffle: Shuffle again in each epoch.
        seed: Seed of the order, below 2**63, equal on all ranks.
        drop_last: Drop last samples that are fewer than ranks. Otherwise they are filled from the beginning of the
            epoch.

    Raises:
        ConfigError: Rank or seed is out of range.

    Attributes:
        position: Position of the job.
        counted: A `ResumableDataLoader` moves the position.
    """

    @public
    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._follows = num_replicas is None
        rank, num_replicas = rank_and_world(rank, num_replicas)
        self.split = Split(rank, num_replicas, 1, Remainder.EVEN if drop_last else Remainder.PAD)
        self.order: Order = IndexOrder(dataset, shuffle=shuffle)
        self.position = DataPosition(seed)
        self._begun = False
        self._drawn_out = False
        self._advanced = 0
        self._forgotten = False
        self.counted = False

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank that are left of the epoch; of the next one, if a pass has come to the end."""
        if self._follows:
            check_joined(self.rank, self.num_replicas)
        over = not self.split.taken(self.position.cursor, self._length)
        if self._begun and (over or (self._drawn_out and not self._advanced)):
            self._forgotten = not over and not self.position.cursor
            self.position.end_epoch()
        elif self._drawn_out and self._left < self._advanced:
            logger.warning(
                "epoch %d was drawn to its end, but advance() did not count %d samples of each rank, which come now. "
                "If a DataLoader with drop_last=True has dropped them, call set_epoch() before each epoch",
                self.position.epoch,
                self._left,
            )
        self._begun, self._drawn_out, self._advanced = True, False, 0
        return self._draw()

    @property
    def num_replicas(self) -> int:
        """Ranks."""
        return self.split.world

    @property
    def rank(self) -> int:
        """This rank."""
        return self.split.rank

    def __len__(self) -> int:
        """Indices of this rank in a whole epoch."""
        return self.split.steps(self._length)

    @public
    def advance(self, samples: int) -> None:
        """Count samples of this rank as used, and as many of each other rank, when a step is done.

        Args:
            samples: Samples since the step before.

        Raises:
            ConfigError: The epoch has not so many left, or a `ResumableDataLoader` counts them.
        """
        whole("samples", samples, 1)
        if self.counted:
            raise ConfigError(
                "the ResumableDataLoader counts what it hands out, and nothing twice: leave advance() out"
            )
        position, left = self.position, self._left
        if samples > left:
            raise ConfigError(f"advance({samples}), but epoch {position.epoch} has {left} samples left for each rank")
        position.cursor = min(position.cursor + samples * self.split.world, self._length)
        self._advanced, self._forgotten = samples, False

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of another epoch."""
        if epoch != self.position.epoch:
            self.position.set_epoch(epoch)
            self._begun = False

    @property
    def seed(self) -> int:
        """The seed of all orders."""
        return self.position.seed

    @public
    def set_seed(self, seed: int) -> None:
        """Continue at the same place in the order of another seed; raises ConfigError unless it is a whole number."""
        self.position.set_seed(seed)

    def state_dict(self) -> dict[str, int]:
        """The position: a few numbers, equal on all ranks.

        Raises:
            ConfigError: An epoch was drawn without ``advance``.
        """
        if self._forgotten:
            raise ConfigError(
                "an epoch was drawn, but advance() never called: the position is unknown. Call advance("
                "len(batch)) after each step, or use ResumableDataLoader"
            )
        return self.position.state(self._length, self.order.identity(self.position.seed, self.position.epoch))

    @public
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called.

        Raises:
            ConfigError: It is no such state, or of another data set or order within an epoch.
        """
        load(self.position, self.order, state_dict)
        self._begun = self._forgotten = False

    def rank_state_dict(self) -> dict[str, Any]:
        """State of this rank: empty."""
        return {}

    def load_rank_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load it; raises ConfigError unless it is empty."""
        nothing_own(state_dict)

    @property
    def _length(self) -> int:
        return self.order.length(self.position.seed, self.position.epoch)

    @property
    def _left(self) -> int:
        """Samples of this rank that are left of the epoch."""
        return -(-(self._length - self.position.cursor) // self.split.world)

    def _draw(self) -> Iterator[int]:
        position, length = self.position, self._length
        # One step of the whole epoch: a plain DataLoader makes its own batches of these indices.
        everything = Split(self.split.rank, self.split.world, max(length, 1), self.split.rest)
        places = everything.positions(position.cursor, length)
        seed, epoch, jumps = position.seed, position.epoch, position.jumps
        # In chunks: one lookup in a tensor for each index would take longer than most samples.
        for start in range(0, len(places), CHUNK):
            check_length(epoch, length, self.order.length(seed, epoch))
            yield from self.order.take(seed, epoch, places[start : start + CHUNK])
        self._drawn_out = jumps == position.jumps


def load(position: DataPosition, order: Order, state: Mapping[str, Any]) -> None:
    """Take over a position, if it means the same in this order.

    Raises:
        ConfigError: It does not; nothing has changed then.
    """
    # Into a copy first, so that a state that is refused changes nothing.
    loaded = DataPosition(position.seed, jumps=position.jumps)
    loaded.load(state)
    length, identity = order.length(loaded.seed, loaded.epoch), order.identity(loaded.seed, loaded.epoch)
    ended = 0 < loaded.cursor == state["length"]
    if loaded.cursor and not ended and (length, identity) != (state["length"], state["order"]):
        raise ConfigError(
            coded(
                f"the position is sample {loaded.cursor} of {state['length']} of epoch {loaded.epoch} in order "
                f"{state['order']}; here that epoch has {length} in order {identity}. Give the data set, the sampler "
                "and shuffle that it was saved with, or load a state of the beginning of an epoch",
                "FC-040",
            )
        )
    position.seed = loaded.seed
    position.jump(loaded.epoch, length if ended else loaded.cursor)


def check_length(epoch: int, before: int, now: int) -> None:
    """See that an epoch has as many samples as at its beginning; raises ConfigError if not."""
    if before != now:
        raise ConfigError(
            f"epoch {epoch} began with {before} samples, and now there are {now}: another order would lose some of "
            "them. Let the data set change between epochs only"
        )
