"""Iterable data sets of which each loader worker has a shard of its own: the position is one per rank and worker."""

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from fastckpt.data.generators import seed_generators
from fastckpt.data.mixing import mix
from fastckpt.data.order import COLLATE, END, SAMPLE, STREAM
from fastckpt.data.position import VERSION, read, whole
from fastckpt.data.source import Answer
from fastckpt.data.split import Rest, Split
from fastckpt.data.stream import ended_before
from fastckpt.errors import ConfigError


class Start(NamedTuple):
    """Where a shard goes on.

    Attributes:
        used: Samples of it.
        state: What the data set itself saved there; None if it saves nothing.
        over: Whether the data set has come to its end, where it may have gone back to its beginning.
    """

    used: int = 0
    state: Any = None
    over: bool = False


class ShardRequest(NamedTuple):
    """The next batch of a shard.

    Attributes:
        sequence: Tells one pass over the data from the next.
        seed: For the generators.
        epoch: From 0.
        start: Where the pass begins, in the first request for a shard; None only passes a worker's turn.
    """

    sequence: int
    seed: int
    epoch: int
    start: Start | None


class ShardReader:
    """Iterates one shard per worker, and tells with each batch where the shard goes on.

    Args:
        dataset: The user's.
        collate: Makes a batch of a list of samples; of a single sample if ``batched`` is not set.
        split: Rank, world, samples per batch, and whether an incomplete batch at the end is dropped.
        shards: Shards per rank that the data set is dealt out to in turn; 0 if it shards itself.
        batched: Whether a batch is a list.
        seeded: Whether generators are set before each sample.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], split: Split, shards: int, *, batched: bool, seeded: bool
    ) -> None:
        self.dataset = dataset
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

    def __getitem__(self, request: ShardRequest) -> tuple[Any, Any]:
        """A batch, with the shard and where it goes on; END and nothing if there is none."""
        if request.start is None:
            return (self.worker, Answer.NOTHING), None
        if request.sequence != self._sequence:
            self._begin(request, request.start)
        first = self._count
        samples: list[Any] = []
        while len(samples) < self._split.batch and (sample := self._next(request)) is not END:
            samples.append(sample)
        if not samples or (len(samples) < self._split.batch and self._split.rest is Rest.DROP):
            return (self.worker, Answer.END), None
        after = Start(self._count, self._state(), self._over)
        if self._seeded:
            seed_generators(mix(COLLATE, *self._key(request), first))
        return (self.worker, after), self._collate(samples if self._batched else samples[0])

    def _begin(self, request: ShardRequest, start: Start) -> None:
        self._sequence, self._count = request.sequence, 0
        self._leave_pass()
        self._over = start.over
        if start.over:
            self._samples, self._count = iter(()), start.used
            return
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(request.epoch)
        if self._seeded:
            seed_generators(mix(STREAM, *self._key(request)))
        self._samples = self._opened(start.state)
        if start.state is not None:
            self._count = start.used
        while self._count < start.used:
            if self._next(request) is END:
                raise ended_before(start.used, self._count)

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
        """After a pass that was broken off the data set would go on in its middle: it begins as in a new worker."""
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
        for i in range(every):
            if self._seeded:
                seed_generators(mix(SAMPLE, *self._key(request), self._count, i))
            drawn = next(self._samples, END)
            self._over |= drawn is END
            if i == mine:
                sample = drawn
        self._count += sample is not END
        return sample

    def _state(self) -> Any:
        """The data set's own; a copy, because it goes on changing while the batch travels."""
        for holder in (self.dataset, self._samples):
            if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
                return copy.deepcopy(holder.state_dict())
        return None

    def _key(self, request: ShardRequest) -> tuple[int, ...]:
        """What numbers are drawn from: of the shard, if it is one; else the same for all, as the data are."""
        own = () if self._shards else (self._split.rank, self.worker)
        return request.seed, request.epoch, *own


class Shards:
    """The positions of this rank's shards, and whose turn it is.

    Args:
        reader: What the workers get.
        split: Rank and world.
        shards: Of this rank: one per loader worker.
        seed: For the generators.
    """

    def __init__(self, reader: ShardReader, split: Split, shards: int, seed: int) -> None:
        self.reader = reader
        self.jumps = 0
        self.epoch = 0
        self._split = split
        self.seed = whole("seed", seed, -(2**63))
        self._shards = shards
        self._begins: list[Start] = []
        self._awaited: tuple[int, int] | None = None
        self._turn = 0
        self._ended: set[int] = set()
        self._sequence = 0
        self.set_epoch(0)

    def requests(self) -> Iterator[ShardRequest]:
        """Requests in turn, as DataLoader deals them out to workers: the first is the first worker's."""
        if self._awaited is not None:
            raise ConfigError("load_state_dict() was called, but not load_rank_state_dict(): each rank of an iterable "
                              "data set that is sharded has a state of its own")  # fmt: skip
        self._sequence += 1
        self._ended = set()
        sequence, begins, turn = self._sequence, list(self._begins), self._turn
        for number in count():
            shard = number % self._shards
            start = begins[shard] if number < turn + self._shards else Start()
            yield ShardRequest(sequence, self.seed, self.epoch, start if number >= turn else None)

    def reached(self, mark: Any) -> Answer | None:
        """Move a shard to where a batch brings it; the epoch is over when all shards have ended."""
        shard, after = mark
        if after is Answer.NOTHING:
            return Answer.NOTHING
        if after is Answer.END:
            self._ended.add(shard)
            return Answer.END if len(self._ended) == self._shards else Answer.NOTHING
        self._begins[shard] = after
        self._turn = (shard + 1) % self._shards
        return None

    def ends_here(self) -> bool:
        """Nobody knows before all shards have ended."""
        return False

    def end_epoch(self) -> None:
        """Go on to the beginning of the next one."""
        self.epoch += 1
        self._begins, self._turn = [Start()] * self._shards, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch = whole("epoch", epoch)
        self._begins, self._turn = [Start()] * self._shards, 0
        self.jumps += 1

    def batches(self) -> int:
        """Batches of this rank in a whole epoch; raises TypeError because nobody knows."""
        raise TypeError("how many batches each shard has is not known before the end")

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """How many shards there are is common to all ranks; where they are is this rank's own."""
        common = {"version": VERSION, "seed": self.seed, "world": self._split.world, "shards": self._shards}
        counts, saved = [start.used for start in self._begins], [start.state for start in self._begins]
        own = {"version": VERSION, "rank": self._split.rank, "epoch": self.epoch, "turn": self._turn,
               "counts": counts, "dataset": saved, "over": [start.over for start in self._begins]}  # fmt: skip
        return common, own

    def load(self, common: Mapping[str, Any]) -> None:
        """See that the shards are those that were saved; raises ConfigError if their number has changed."""
        numbers = read(common, ("seed", "world", "shards"))
        saved, here = (numbers["world"], numbers["shards"]), (self._split.world, self._shards)
        if saved != here:
            raise ConfigError(
                f"saved with {saved[0]} ranks of {saved[1]} shards each (one for each loader worker), now {here[0]} of "
                f"{here[1]}: an iterable data set that is sharded or has a state of its own goes on with the same only"
            )
        self.seed, self._awaited = numbers["seed"], saved

    def load_own(self, own: Mapping[str, Any]) -> None:
        """Take over where this rank's shards are; raises ConfigError if these are another rank's, or not all."""
        numbers = read(own, ("rank", "epoch", "turn"))
        counts, saved = own.get("counts", ()), own.get("dataset", ())
        over = own.get("over", [False] * len(counts))
        if numbers["rank"] != self._split.rank or not len(counts) == len(saved) == self._shards:
            raise ConfigError(
                f"the state is that of rank {numbers['rank']} with {len(counts)} shards; "
                f"this is rank {self._split.rank} with {self._shards}"
            )
        self.set_epoch(numbers["epoch"])
        self._begins = [Start(*each) for each in zip(counts, saved, over, strict=True)]
        self._turn, self._awaited = whole("turn", numbers["turn"], 0, self._shards), None
