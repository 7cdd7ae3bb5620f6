"""The part of a sharded stream in the loader workers: each iterates its shard, and reports where it goes on."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from fastckpt._core.data.generators import generators_kept, seed_generators
from fastckpt._core.data.known_libraries import begin_epoch, visit_next_epoch
from fastckpt._core.data.split import Remainder, Split
from fastckpt.data.order import COLLATE, END, SAMPLE, STREAM
from fastckpt.data.source import SourceAnswer
from fastckpt.data.splitmix import mix
from fastckpt.data.streams.checksum import checksum
from fastckpt.data.streams.stream import ended_before
from fastckpt.data.streams.trial import MIDDLE, Trial, Tried, look, look_again


class ShardStart(NamedTuple):
    """The position at which a shard continues.

    Attributes:
        used: Samples of it.
        state: The data set's own state there; None if it saves nothing.
        over: Whether the data set has come to its end, where it may have gone back to its beginning.
        last: The checksum of the sample that was used last, where it is passed over at a resume.
    """

    used: int = 0
    state: Any = None
    over: bool = False
    last: int | None = None


class ShardRequest(NamedTuple):
    """The next batch of a shard.

    Attributes:
        sequence: Distinguishes one pass over the data from the next.
        seed: For the generators.
        epoch: From 0.
        start: Where the pass begins, in the first request for a shard; None only passes a worker's turn.
        counts: Whether samples are counted though the data set has a state.
    """

    sequence: int
    seed: int
    epoch: int
    start: ShardStart | None
    counts: bool = False


class ShardStep(NamedTuple):
    """A batch of a shard and the position after it.

    Attributes:
        shard: Of which loader worker.
        after: Where the shard goes on; an `SourceAnswer` if there is no batch.
        unlike: Whether the sample that was used last, before the pass, is another one now.
    """

    shard: int
    after: Any
    unlike: bool = False


class ShardReader:
    """Iterates one shard per worker, and reports with each batch where the shard continues.

    Args:
        dataset: The user's.
        collate: Makes a batch of a list of samples; of a single sample if ``batched`` is not set.
        split: Rank, world, samples per batch, and whether an incomplete batch at the end is dropped.
        shards: Shards per rank that the data set is dealt out to in turn; 0 if it shards itself.
        batched: Whether a batch is a list.
        seeded: Whether generators are set before each sample.
        compares: Whether the last sample of each batch gets a checksum, where samples are counted.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        split: Split,
        shards: int,
        *,
        batched: bool,
        seeded: bool,
        compares: bool,
    ) -> None:
        self.dataset = dataset
        self._compares = compares
        self._lossy = self._unlike = False
        self.worker = 0
        self._collate = collate
        self._split = split
        self._shards = shards
        self._batched = batched
        self._seeded = seeded
        self._sequence = -1
        self._samples: Iterator[Any] = iter(())
        self._over = True
        self._untouched: Any = None
        self._count = 0

    def __getitem__(self, request: ShardRequest | Trial) -> tuple[Any, Any]:
        """A batch, with the shard and where it goes on; no batch at the end, and for a trial."""
        if isinstance(request, Trial):
            with generators_kept():
                return self._try(request), None
        if request.start is None:
            return ShardStep(self.worker, SourceAnswer.NOTHING), None
        # Persistent workers keep their iterator from pass to pass: the first request of a new pass reopens it.
        if request.sequence != self._sequence:
            self._begin(request, request.start)
        first = self._count
        samples: list[Any] = []
        while len(samples) < self._split.batch and (sample := self._next(request)) is not END:
            samples.append(sample)
        if not samples or (len(samples) < self._split.batch and self._split.rest is Remainder.DROP):
            return ShardStep(self.worker, SourceAnswer.END, self._unlike), None
        state = None if request.counts or self._lossy else self._state()
        last = checksum(samples[-1]) if state is None and self._compares else None
        if self._seeded:
            seed_generators(mix(COLLATE, *self._key(request), first))
        after = ShardStep(self.worker, ShardStart(self._count, state, self._over, last), self._unlike)
        return after, self._collate(samples if self._batched else samples[0])

    def _try(self, trial: Trial) -> Tried:
        """Open the shard twice, and where its own state leads after some samples."""
        states: dict[int, Any] = {}

        def opened(start: ShardStart) -> Callable[[int], Any]:
            self._over = False  # a trial leaves the data set in its middle, or at an end that is not the epoch's
            self._begin(ShardRequest(-1, trial.seed, trial.epoch, None), start)
            return partial(self._draw, trial)

        def opened_for_states() -> Callable[[int], Any]:
            draw = opened(ShardStart())

            def drawn(number: int) -> Any:
                if number in wanted:
                    states[number] = self._state()
                return draw(number)

            return drawn

        seen = look(lambda: opened(ShardStart()))
        middle = min(MIDDLE, len(seen.samples) // 2)
        wanted = (middle, middle + 1)
        if trial.alone:
            visit_next_epoch(self.dataset, trial.epoch)
        again = look_again(opened_for_states)
        for number, state in states.items():
            if state is not None:
                rest = seen._replace(samples=seen.samples[number:])
                there = look(partial(opened, ShardStart(state=state)), number)
                self._lossy |= rest.differs(there) is not None
        self._over = False
        return Tried(seen, again, self._lossy)

    def _begin(self, request: ShardRequest, start: ShardStart) -> None:
        self._sequence, self._count, self._unlike = request.sequence, 0, False
        # Before the shard is opened: a data set that was left in its middle may go on from there in iter().
        self._leave_pass()
        self._over = start.over
        # A data set with a state may have gone back to its beginning at its end: opening it would give the epoch again.
        if start.over:
            self._samples, self._count = iter(()), start.used
            return
        begin_epoch(self.dataset, request.epoch)
        if self._seeded:
            seed_generators(mix(STREAM, *self._key(request)))
        self._samples = self._opened(start.state)
        if start.state is not None:
            self._count = start.used
        sample: Any = None
        while self._count < start.used:
            if (sample := self._next(request)) is END:
                raise ended_before(start.used, self._count)
        self._unlike = start.state is None and start.last is not None and checksum(sample) != start.last

    def _opened(self, state: Any) -> Iterator[Any]:
        """The samples from a state on, which the data set or its iterator gave; from the beginning without one."""
        whole = hasattr(self.dataset, "load_state_dict")
        if state is not None and whole:
            self.dataset.load_state_dict(copy.deepcopy(state))
        samples: Any = iter(self.dataset)
        if state is not None and not whole:
            samples.load_state_dict(copy.deepcopy(state))
        return samples  # type: ignore[no-any-return]

    def _leave_pass(self) -> None:
        """Reset the data set after a pass that was broken off: it begins as in a new worker, and not in its middle."""
        if not hasattr(self.dataset, "load_state_dict"):
            return
        if self._untouched is None:
            self._untouched = copy.deepcopy(self.dataset.state_dict())
        elif not self._over:
            self.dataset.load_state_dict(copy.deepcopy(self._untouched))

    def _next(self, request: ShardRequest) -> Any:
        """The next sample of this shard."""
        every = self._split.world * self._shards if self._shards else 1
        mine = self._split.rank * self._shards + self.worker if self._shards else 0
        sample: Any = END
        # Every worker reads the whole stream and keeps each n-th sample: so no sample is in two shards.
        for i in range(every):
            drawn = self._draw(request, i)
            if i == mine:
                sample = drawn
        self._count += sample is not END
        return sample

    def _draw(self, request: ShardRequest | Trial, number: int) -> Any:
        """The next sample of the data set."""
        if self._seeded:
            seed_generators(mix(SAMPLE, *self._key(request), self._count, number))
        drawn = next(self._samples, END)
        self._over |= drawn is END
        return drawn

    def _state(self) -> Any:
        """The data set's own; a copy, because it goes on changing while the batch travels."""
        for holder in (self.dataset, self._samples):
            if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
                return copy.deepcopy(holder.state_dict())
        return None

    def _key(self, request: ShardRequest | Trial) -> tuple[int, ...]:
        """The key of random numbers: the shard's, if it is one; else one for all, because all have the same data."""
        own = () if self._shards else (self._split.rank, self.worker)
        return request.seed, request.epoch, *own
