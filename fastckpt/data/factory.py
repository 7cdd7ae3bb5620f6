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


def source_of(requested: RequestedLoader) -> tuple[Source, ResumableSampler | None]:
    """The source that the loader draws from, and the sampler that shares its position, if there is one."""
    if not requested.iterable:
        return _samples(requested)
    if requested.sharded or hasattr(requested.dataset, "state_dict"):
        return _shards(requested), None
    split, judge = _split(requested), _judge(requested)
    reader = StreamReader(requested.dataset, requested.collate, split, **_ways(requested, judge))
    return Streamed(reader, split, DataPosition(requested.seed), judge, max(requested.num_workers, 1)), None


def _samples(requested: RequestedLoader) -> tuple[Source, ResumableSampler | None]:
    sampler, batch_sampler = requested.sampler, requested.batch_sampler
    reader = SampleReader(
        requested.dataset,
        requested.collate,
        batched=requested.batch_size is not None,
        seeding=requested.seeding,
    )
    drawn = batch_sampler if batch_sampler is not None else sampler
    if drawn is not None and not isinstance(drawn, ResumableSampler):
        position = DataPosition(requested.seed)
        order = DrawnOrder(drawn)
        return Samples(reader, order, _split(requested), position, batches_given=batch_sampler is not None), None
    own = drawn  # one that has no samples for this rank is false
    if own is None:
        own = ResumableSampler(
            requested.dataset, requested.num_replicas, requested.rank, requested.shuffle, requested.seed
        )
    # The loader moves the position from now on: the sampler's advance() would count batches twice.
    own.counted = True
    split = Split(own.split.rank, own.split.world, _batch(requested), _rest(requested, own.split.rest))
    return Samples(reader, own.order, split, own.position, batches_given=False), own


def _shards(requested: RequestedLoader) -> Source:
    split, judge, count = _split(requested), _judge(requested), max(requested.num_workers, 1)
    dealt = 0 if requested.sharded else count
    reader = ShardReader(requested.dataset, requested.collate, split, dealt, **_ways(requested, judge))
    return ShardedStream(reader, split, count, requested.seed, judge, requested.count)


def _judge(requested: RequestedLoader) -> Judge:
    # With ranks that the user names, other ranks of the process group may read another stream.
    everyone = (requested.rank, requested.num_replicas) == (None, None)
    return Judge(
        requested.dataset, _split(requested), requested.repeatable, alike=not requested.sharded, everyone=everyone
    )


def _ways(requested: RequestedLoader, judge: Judge) -> dict[str, bool]:
    """Options of a reader of a stream."""
    return {
        "batched": requested.batch_size is not None,
        "seeded": requested.seeding != "none",
        "compares": judge.compares,
    }


def _split(requested: RequestedLoader) -> Split:
    rank, world = rank_and_world(requested.rank, requested.num_replicas)
    return Split(rank, world, _batch(requested), _rest(requested, Remainder.PAD))


def _batch(requested: RequestedLoader) -> int:
    return 1 if requested.batch_size is None else requested.batch_size


def _rest(requested: RequestedLoader, otherwise: Remainder) -> Remainder:
    if requested.drop_last:
        return Remainder.DROP
    return Remainder.UNEVEN if requested.uneven else otherwise
