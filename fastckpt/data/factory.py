"""Which source a data set needs."""

from typing import Any

from torch.utils.data import default_collate, default_convert

from fastckpt._core.data.position import DataPosition
from fastckpt._core.data.split import Remainder, Split, rank_and_world
from fastckpt.data.loader_options import RequestedLoader
from fastckpt.data.order import DrawnOrder
from fastckpt.data.sampler import ResumableSampler
from fastckpt.data.samples import SampleReader, Samples
from fastckpt.data.source import Source
from fastckpt.data.streams.shard_reader import ShardReader
from fastckpt.data.streams.sharded_stream import ShardedStream
from fastckpt.data.streams.stream import Streamed, StreamReader
from fastckpt.data.streams.trial import Judge


def source_of(wish: RequestedLoader) -> tuple[Source, ResumableSampler | None]:
    """What the loader draws from, and the sampler that shares its position, if there is one."""
    if not wish.iterable:
        return _samples(wish)
    if wish.get("sharded") or hasattr(wish.dataset, "state_dict"):
        return _shards(wish), None
    split, judge = _split(wish), _judge(wish)
    reader = StreamReader(wish.dataset, collate_of(wish), split, **_ways(wish, judge))
    return Streamed(reader, split, DataPosition(wish.seed), judge, max(wish.get("num_workers", 0), 1)), None


def _samples(wish: RequestedLoader) -> tuple[Source, ResumableSampler | None]:
    sampler, batch_sampler = wish.get("sampler"), wish.get("batch_sampler")
    reader = SampleReader(
        wish.dataset,
        collate_of(wish),
        batched=wish.batch_size is not None,
        seeding=_seeding(wish),
    )
    drawn = batch_sampler if batch_sampler is not None else sampler
    if drawn is not None and not isinstance(drawn, ResumableSampler):
        position = DataPosition(wish.seed)
        order = DrawnOrder(drawn)
        return Samples(reader, order, _split(wish), position, batches_given=batch_sampler is not None), None
    own = drawn  # one that has no samples for this rank is false
    if own is None:
        own = ResumableSampler(wish.dataset, wish.get("num_replicas"), wish.get("rank"), wish.shuffle, wish.seed)
    own.counted = True
    split = Split(own.split.rank, own.split.world, _batch(wish), _rest(wish, own.split.rest))
    return Samples(reader, own.order, split, own.position, batches_given=False), own


def _shards(wish: RequestedLoader) -> Source:
    split, judge, count = _split(wish), _judge(wish), max(wish.get("num_workers", 0), 1)
    dealt = 0 if wish.get("sharded") else count
    reader = ShardReader(wish.dataset, collate_of(wish), split, dealt, **_ways(wish, judge))
    return ShardedStream(reader, split, count, wish.seed, judge, wish.get("count"))


def _judge(wish: RequestedLoader) -> Judge:
    everyone = (wish.get("rank"), wish.get("num_replicas")) == (None, None)
    return Judge(wish.dataset, _split(wish), wish.get("repeatable"), alike=not wish.get("sharded"), everyone=everyone)


def _ways(wish: RequestedLoader, judge: Judge) -> dict[str, bool]:
    """How a reader of a stream works."""
    return {
        "batched": wish.batch_size is not None,
        "seeded": _seeding(wish) != "none",
        "compares": judge.compares,
    }


def _split(wish: RequestedLoader) -> Split:
    rank, world = rank_and_world(wish.get("rank"), wish.get("num_replicas"))
    return Split(rank, world, _batch(wish), _rest(wish, Remainder.PAD))


def _batch(wish: RequestedLoader) -> int:
    return 1 if wish.batch_size is None else wish.batch_size


def _rest(wish: RequestedLoader, otherwise: Remainder) -> Remainder:
    if wish.drop_last:
        return Remainder.DROP
    return Remainder.UNEVEN if wish.get("uneven") else otherwise


def _seeding(wish: RequestedLoader) -> str:
    return str(wish.get("seeding", "sample"))


def collate_of(wish: RequestedLoader) -> Any:
    """What makes a batch of samples."""
    return wish.get("collate_fn") or (default_convert if wish.batch_size is None else default_collate)
