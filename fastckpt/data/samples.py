"""Data sets that give a sample for an index."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fastckpt.data.generators import seed_generators
from fastckpt.data.mixing import mix
from fastckpt.data.order import COLLATE, SAMPLE, Order
from fastckpt.data.position import Position, Positioned
from fastckpt.data.sampler import check_length, load
from fastckpt.data.source import Answer
from fastckpt.data.split import Split


class Request(NamedTuple):
    """One batch.

    Attributes:
        after: The cursor when it is used.
        seed: That of the order.
        epoch: From 0.
        places: For each key its position in the epoch, and its number there.
        keys: What the data set is asked for.
    """

    after: int
    seed: int
    epoch: int
    places: list[tuple[int, int]]
    keys: list[Any]


class SampleReader:
    """Asks a data set for a batch, each sample with generators that are seeded for it.

    Args:
        dataset: The user's; ``__getitems__`` is used where it has one, as DataLoader does.
        collate: Makes a batch of a list of samples; of a single sample if not ``batched``.
        batched: Whether requests have several keys.
        seeding: "sample" seeds before each sample, "batch" before each batch, "none" not at all.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool, seeding: str) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batched = batched
        self._seeding = seeding
        self.worker = 0

    def __getitem__(self, request: Request) -> tuple[int, Any]:
        """A batch, and the cursor after it."""
        seed, epoch, places, keys = request.seed, request.epoch, request.places, request.keys
        if self._seeding == "sample":
            samples = []
            for place, key in zip(places, keys, strict=True):
                seed_generators(mix(SAMPLE, seed, epoch, *place))
                samples += self._fetch([key])
        else:
            if self._seeding == "batch":
                seed_generators(mix(SAMPLE, seed, epoch, *places[0]))
            samples = self._fetch(keys)
        if self._seeding != "none":
            seed_generators(mix(COLLATE, seed, epoch, *places[0]))
        return request.after, self._collate(samples if self._batched else samples[0])

    def _fetch(self, keys: list[Any]) -> list[Any]:
        if self._batched and getattr(self.dataset, "__getitems__", None):
            samples: list[Any] = self.dataset.__getitems__(keys)
            return samples
        return [self.dataset[key] for key in keys]


class Samples(Positioned):
    """The position in the order of a data set.

    Args:
        reader: What the workers get.
        order: Of samples; of whole batches of samples, if a batch sampler made them.
        split: How ranks share it.
        position: Shared with a `ResumableSampler`.
        batches_given: Whether each key of the order is a batch of keys.
    """

    def __init__(
        self, reader: SampleReader, order: Order, split: Split, position: Position, *, batches_given: bool
    ) -> None:
        super().__init__(position)
        self.reader = reader
        self._order = order
        self._split = split
        self._batches_given = batches_given
        self._known: tuple[tuple[int, int], int] = (-1, -1), 0

    def requests(self) -> Iterator[Request]:
        """The batches of this rank from the position to the end of the epoch."""
        seed, epoch, cursor, length = self._position.seed, self.epoch, self._position.cursor, self._length
        while places := self._split.positions(cursor, length):
            check_length(epoch, length, self._order.length(seed, epoch))
            cursor += self._split.taken(cursor, length)
            keys = self._order.take(seed, epoch, places)
            if self._batches_given:
                yield Request(cursor, seed, epoch, [(places[0], i) for i in range(len(keys[0]))], list(keys[0]))
            else:
                yield Request(cursor, seed, epoch, [(place, 0) for place in places], keys)

    def reached(self, mark: int) -> Answer | None:
        """Move the cursor there."""
        self._position.cursor = mark
        return None

    def ends_here(self) -> bool:
        """Whether this rank has no batch left."""
        return not self._split.positions(self._position.cursor, self._length)

    def batches(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self._split.steps(self._length)

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The position is common to all ranks."""
        identity = self._order.identity(self._position.seed, self.epoch)
        return dict(self._position.state(self._length, identity)), {}

    def load(self, common: Mapping[str, Any]) -> None:
        """Take over the position; raises ConfigError if it is of another data set or order."""
        load(self._position, self._order, common)

    @property
    def _length(self) -> int:
        place, length = (self.jumps, self.epoch), self._order.length(self._position.seed, self.epoch)
        if self._position.cursor and self._known[0] == place:
            check_length(self.epoch, self._known[1], length)
        self._known = place, length
        return length
