"""The source that a data set needs."""

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
    if wish.sharded or hasattr(wish.dataset, "state_dict"):
        return _shards(wish), None
    split, judge = _split(wish), _judge(wish)
    reader = StreamReader(wish.dataset, wish.collate, split, **_ways(wish, judge))
    return Streamed(reader, split, DataPosition(wish.seed), judge, max(wish.num_workers, 1)), None


def _samples(wish: RequestedLoader) -> tuple[Source, ResumableSampler | None]:
    sampler, batch_sampler = wish.sampler, wish.batch_sampler
    reader = SampleReader(
        wish.dataset,
        wish.collate,
        batched=wish.batch_size is not None,
        seeding=wish.seeding,
    )
    drawn = batch_sampler if batch_sampler is not None else sampler
    if drawn is not None and not isinstance(drawn, ResumableSampler):
        position = DataPosition(wish.seed)
        order = DrawnOrder(drawn)
        return Samples(reader, order, _split(wish), position, batches_given=batch_sampler is not None), None
    own = drawn  # one that has no samples for this rank is false
    if own is None:
        own = ResumableSampler(wish.dataset, wish.num_replicas, wish.rank, wish.shuffle, wish.seed)
    own.counted = True
    split = Split(own.split.rank, own.split.world, _batch(wish), _rest(wish, own.split.rest))
    return Samples(reader, own.order, split, own.position, batches_given=False), own


def _shards(wish: RequestedLoader) -> Source:
    split, judge, count = _split(wish), _judge(wish), max(wish.num_workers, 1)
    dealt = 0 if wish.sharded else count
    reader = ShardReader(wish.dataset, wish.collate, split, dealt, **_ways(wish, judge))
    return ShardedStream(reader, split, count, wish.seed, judge, wish.count)


def _judge(wish: RequestedLoader) -> Judge:
    everyone = (wish.rank, wish.num_replicas) == (None, None)
    return Judge(wish.dataset, _split(wish), wish.repeatable, alike=not wish.sharded, everyone=everyone)


def _ways(wish: RequestedLoader, judge: Judge) -> dict[str, bool]:
    """How a reader of a stream works."""
    return {
        "batched": wish.batch_size is not None,
        "seeded": wish.seeding != "none",
        "compares": judge.compares,
    }


def _split(wish: RequestedLoader) -> Split:
    rank, world = rank_and_world(wish.rank, wish.num_replicas)
    return Split(rank, world, _batch(wish), _rest(wish, Remainder.PAD))


def _batch(wish: RequestedLoader) -> int:
    return 1 if wish.batch_size is None else wish.batch_size


def _rest(wish: RequestedLoader, otherwise: Remainder) -> Remainder:
    if wish.drop_last:
        return Remainder.DROP
    return Remainder.UNEVEN if wish.uneven else otherwise
