"""Iterable data sets of which each loader worker has a shard of its own: the position is one per rank and worker."""

import logging
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from fastckpt._core.data.known_libraries import leaves_out, share_epoch
from fastckpt._core.data.position import VERSION, DataPosition, read, whole
from fastckpt._core.data.split import Split
from fastckpt.data.source import Source, SourceAnswer
from fastckpt.data.streams.shard_reader import ShardReader, ShardRequest, ShardStart, ShardStep
from fastckpt.data.streams.trial import Judge, Trial, Tried
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")


class ShardedStream(Source):
    """The positions of this rank's shards, and the next shard.

    Args:
        reader: The workers' reader.
        split: Rank and world.
        shards: Of this rank: one per loader worker.
        seed: For the generators.
        judge: Of the trial at the first start.
        counts: Whether to count samples though the data set has a state; None to do so if that is known to be lossy.
    """

    def __init__(
        self, reader: ShardReader, split: Split, shards: int, seed: int, judge: Judge, counts: bool | None
    ) -> None:
        super().__init__(reader, DataPosition(seed))
        self._judge, self._chosen, self._counts = judge, counts, bool(counts)
        self._split = split
        self._shards = shards
        self._begins: list[ShardStart] = []
        self._awaited: tuple[int, int] | None = None
        self._turn = 0
        self._ended: set[int] = set()
        self._sequence = 0
        self.set_epoch(0)
        if left_out := leaves_out(reader.dataset):
            self._is_lossy(f"its {left_out}")

    def requests(self) -> Iterator[ShardRequest | Trial]:
        """Requests in turn, as DataLoader deals them out to workers: the first is the first worker's."""
        if self._awaited is not None:
            raise ConfigError(
                "load_state_dict() was called, but not load_rank_state_dict(): each rank of an iterable "
                "data set that is sharded has a state of its own"
            )
        self._sequence += 1
        self._ended = set()
        sequence, begins, turn = self._sequence, list(self._begins), self._turn
        share_epoch(self.reader.dataset, self.epoch, self._shards)
        # Before the first request of a shard, because DataLoader deals requests out in turn: one trial for each worker.
        yield from self._judge.ask(self.seed, self.epoch, self._shards)
        for number in count():
            shard = number % self._shards
            # Only a worker's first request has its position: afterwards it goes on from its own iterator.
            start = begins[shard] if number < turn + self._shards else ShardStart()
            yield ShardRequest(sequence, self.seed, self.epoch, start if number >= turn else None, self._counts)

    def reached(self, mark: ShardStep | Tried) -> SourceAnswer | None:
        """Move a shard to where a batch brings it; the epoch is over when all shards have ended."""
        if isinstance(mark, Tried):
            self._judge.judge(mark)
            if mark.lossy:
                self._is_lossy("what it holds ready")
            return SourceAnswer.NOTHING
        shard, after, unlike = mark
        if unlike:
            self._judge.warn(f"the last sample of shard {shard}")
        if after is SourceAnswer.NOTHING:
            return SourceAnswer.NOTHING
        if after is SourceAnswer.END:
            self._ended.add(shard)
            # Shards may be of unlike lengths: the epoch is over with the longest.
            return SourceAnswer.END if len(self._ended) == self._shards else SourceAnswer.NOTHING
        self._begins[shard] = after
        self._turn = (shard + 1) % self._shards
        return None

    def end_epoch(self) -> None:
        """Go on to the beginning of the next one."""
        super().end_epoch()
        self._begins, self._turn = [ShardStart()] * self._shards, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        super().set_epoch(epoch)
        self._begins, self._turn = [ShardStart()] * self._shards, 0

    def batches(self) -> int:
        """Batches of this rank in a whole epoch; raises TypeError because that is not known."""
        raise TypeError("how many batches each shard has is not known before the end")

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """State common to all ranks, the number of shards, and this rank's own, their positions."""
        common = {"version": VERSION, "seed": self.seed, "world": self._split.world, "shards": self._shards}
        counts, saved = [start.used for start in self._begins], [start.state for start in self._begins]
        own = {
            "version": VERSION,
            "rank": self._split.rank,
            "epoch": self.epoch,
            "turn": self._turn,
            "counts": counts,
            "dataset": saved,
            "over": [start.over for start in self._begins],
            "checksums": [start.last for start in self._begins],
            "counted": int(self._counts),
        }
        return common, own

    def _is_lossy(self, left_out: str) -> None:
        """Count from now on, unless the user has chosen; it is logged once."""
        name, counts = type(self.reader.dataset).__name__, self._chosen is not False
        if not self._split.rank and self._chosen is None and not self._counts:
            logger.warning(
                "%s's own state leaves out %s: samples are counted instead, and a resume reads and passes over those "
                "of the epoch that were used. count=True says the same without this line; count=False goes on by the "
                "state, and loses samples at each resume",
                name,
                left_out,
            )
        self._counts = counts

    def load(self, common: Mapping[str, Any]) -> None:
        """See that the shards are those that were saved; raises ConfigError if their number has changed."""
        numbers = read(common, ("seed", "world", "shards"))
        saved, here = (numbers["world"], numbers["shards"]), (self._split.world, self._shards)
        if saved != here:
            raise ConfigError(
                f"saved with {saved[0]} ranks of {saved[1]} shards each (one for each loader worker), now {here[0]} of "
                f"{here[1]}: an iterable data set that is sharded or has a state of its own goes on with the same only"
            )
        self._position.seed, self._awaited = numbers["seed"], saved

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
        self._judge.resumed()
        self._counts = self._chosen is not False and (self._counts or bool(own.get("counted")))
        if self._counts:
            saved = [None] * len(counts)  # earlier versions took a state that leads elsewhere
        last = own.get("checksums", [None] * len(counts))
        self._begins = [ShardStart(*each) for each in zip(counts, saved, over, last, strict=True)]
        self._turn, self._awaited = whole("turn", numbers["turn"], 0, self._shards), None
