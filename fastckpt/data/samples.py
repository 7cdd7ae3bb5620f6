"""Data sets that give a sample for an index."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    ConcatDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from fastckpt._core.data.generators import DrawWatch, SeedWatch, seed_generators
from fastckpt._core.data.position import DataPosition
from fastckpt._core.data.split import Split
from fastckpt.data.order import COLLATE, SAMPLE, Order
from fastckpt.data.sampler import check_length, load
from fastckpt.data.source import Source, SourceAnswer
from fastckpt.data.splitmix import mix, mix_each


class SampleRequest(NamedTuple):
    """One batch.

    Attributes:
        after: The cursor when it is used.
        seed: That of the order.
        epoch: From 0.
        places: The position in the epoch of each key; of the batch alone, if a batch sampler made it.
        keys: The data set's keys to read.
    """

    after: int
    seed: int
    epoch: int
    places: range
    keys: list[Any]


class SampleReader:
    """Asks a data set for a batch, each sample with generators that are seeded for it.

    A generator is seeded once something was drawn from it. The batch in which that happens first is asked for again, so
    the samples are as if all were seeded always.

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
        is_fixed = draws_nothing(dataset) and collate in (default_collate, default_convert)
        self._seeding = "none" if is_fixed else seeding
        self._drawn: set[str] = set()
        self._is_first = True
        self.worker = 0

    def __getitem__(self, request: SampleRequest) -> tuple[int, Any]:
        """A batch, and the cursor after it."""
        if self._seeding == "none":
            samples = self._fetch(request.keys)
            return request.after, self._collate(samples if self._batched else samples[0])
        # In the main process the generators are training's own; a loader worker's belong to nobody else.
        restores = get_worker_info() is None
        # Fetched again as long as a generator is drawn from that was
        # not seeded: each turn adds one at least, of three.
        while True:
            watch, failure = DrawWatch(self._drawn, restores=restores), None
            try:
                with SeedWatch() if self._is_first else nullcontext() as seed_watch:
                    batch = self._produce(request)
            except Exception as error:  # noqa: BLE001 (it may follow from drawn numbers)
                failure = error
            drawn = watch.moved()
            if restores:
                watch.restore(drawn)
            if self._is_first and seed_watch and seed_watch.asked:
                drawn.add("torch")
            self._is_first = False
            if drawn:
                self._drawn |= drawn
            elif failure is not None:
                raise failure
            else:
                return request.after, batch

    def _produce(self, request: SampleRequest) -> Any:
        seed, epoch, first, keys = request.seed, request.epoch, request.places[0], request.keys
        if self._drawn and self._seeding == "batch":
            seed_generators(mix(SAMPLE, seed, epoch, first, 0), self._drawn)
        if self._drawn and self._seeding == "sample":
            samples = []
            for number, key in zip(self._numbers(request), keys, strict=True):
                seed_generators(number, self._drawn)
                samples += self._fetch([key])
        elif self._seeding == "sample":
            # Key by key even before anything was drawn: the results must not depend on when the first draw is detected.
            samples = [sample for key in keys for sample in self._fetch([key])] if self._at_once else self._fetch(keys)
        else:
            samples = self._fetch(keys)
        if self._drawn:
            # A key of its own: collate_fn must not draw the same numbers as the last sample.
            seed_generators(mix(COLLATE, seed, epoch, first, 0), self._drawn)
        return self._collate(samples if self._batched else samples[0])

    def _numbers(self, request: SampleRequest) -> list[int]:
        """The seed of each sample: that of its position, and of its number in a batch that has one position."""
        places, count = request.places, len(request.keys)
        columns = (places, [0]) if len(places) == count else (places[:1], range(count))
        return mix_each((SAMPLE, request.seed, request.epoch), *columns)

    def _fetch(self, keys: list[Any]) -> list[Any]:
        if self._at_once:
            samples: list[Any] = self.dataset.__getitems__(keys)
            return samples
        return [self.dataset[key] for key in keys]

    @property
    def _at_once(self) -> bool:
        return self._batched and bool(getattr(self.dataset, "__getitems__", None))


def draws_nothing(dataset: Any) -> bool:
    """Return whether a data set is known to give its samples without a random number."""
    if type(dataset) in (list, tuple, range, torch.Tensor, TensorDataset):
        return True
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    return type(dataset) is ConcatDataset and all(map(draws_nothing, dataset.datasets))


class Samples(Source):
    """The position in the order of a data set.

    Args:
        reader: The workers' reader.
        order: Of samples; of whole batches of samples, if a batch sampler made them.
        split: How ranks share it.
        position: Shared with a `ResumableSampler`.
        batches_given: Whether each key of the order is a batch of keys.
    """

    def __init__(
        self, reader: SampleReader, order: Order, split: Split, position: DataPosition, *, batches_given: bool
    ) -> None:
        super().__init__(reader, position)
        self._order = order
        self._split = split
        self._batches_given = batches_given
        self._known: tuple[tuple[int, int], int] = (-1, -1), 0

    def requests(self) -> Iterator[SampleRequest]:
        """The batches of this rank from the position to the end of the epoch."""
        seed, epoch, cursor, length = self._position.seed, self.epoch, self._position.cursor, self._length
        while places := self._split.positions(cursor, length):
            check_length(epoch, length, self._order.length(seed, epoch))
            cursor += self._split.taken(cursor, length)
            keys = self._order.take(seed, epoch, places)
            yield SampleRequest(cursor, seed, epoch, places, list(keys[0]) if self._batches_given else keys)

    def reached(self, mark: int) -> SourceAnswer | None:
        """Move the cursor there."""
        self._position.cursor = mark
        return None

    def ends_here(self) -> bool:
        """True if this rank has no batch left."""
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
