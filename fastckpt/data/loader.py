"""A data loader that continues: DataLoader's arguments, and a position that a checkpoint saves."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastckpt._core.arguments import public
from fastckpt._core.data.position import whole
from fastckpt._core.data.split import check_joined, rank_and_world
from fastckpt.data.batch_stream import BY_ONE, BatchStream
from fastckpt.data.factory import source_of
from fastckpt.data.loader_options import RequestedLoader, Seeding
from fastckpt.data.loader_worker import WorkerSetup
from fastckpt.data.sampler import ResumableSampler
from fastckpt.errors import ConfigError

FORWARDED = (
    "num_workers",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
"""Attributes of torch's DataLoader that this one has, too."""


class ResumableDataLoader(BatchStream):
    """Replaces ``DataLoader(dataset, sampler=DistributedSampler(dataset))``; a resumed job gets its next batch.

    The position counts batches that the loop got, through all epochs (docs/guides/data.md).

    Args:
        dataset: With indices, or iterable.
        batch_size: Samples per batch and rank; None: single samples.
        shuffle: Shuffle again in each epoch.
        seed: Seed of order and random numbers: 64 bits with sign, equal on all ranks.
        drop_last: Drop incomplete last batches. Otherwise they are filled from the beginning of the epoch, equally on
            all ranks.
        sampler: Keys of an epoch, equal on all ranks, or a `ResumableSampler`.
        batch_sampler: Lists of such keys.
        num_workers: As for DataLoader. So are ``collate_fn``, ``pin_memory``, ``timeout``, ``worker_init_fn``,
            ``multiprocessing_context``, ``prefetch_factor``, ``persistent_workers`` and ``pin_memory_device``.
        generator: Only DataLoader's default; so is ``in_order``.
        num_replicas: Ranks; default: those of torch.distributed, or of the launcher.
        rank: This rank; default likewise.
        uneven: Do not fill the last batches.
        sharded: An iterable data set itself divides samples among ranks and workers.
        repeatable: An iterable data set gives the same samples at each start and on each rank. None tests that, True
            trusts it, False accepts lost samples.
        count: Skip used samples of an iterable data set, although it has a state. None: only if that state is lossy.
        seeding: Seed generators before each "sample" or "batch", or "none".
        accumulate: Batches per optimizer step; the state is that of the last whole step. `Checkpointer` sees steps
            itself.
        ahead: The loop prefetches; the state is that of the batches that ``used`` counted.

    Raises:
        ConfigError: Arguments do not fit together, or their order cannot be continued.

    Attributes:
        sampler: `ResumableSampler` with the same position; None for other samplers and iterable data sets.
    """

    @public
    def __init__(  # noqa: PLR0913 (DataLoader's arguments, and ours)
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        uneven: bool = False,
        sharded: bool = False,
        repeatable: bool | None = None,
        count: bool | None = None,
        seeding: Seeding = "sample",
        accumulate: int = 1,
        ahead: bool = False,
    ) -> None:
        requested = RequestedLoader(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=bool(shuffle),
            seed=seed,
            drop_last=drop_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            generator=generator,
            in_order=in_order,
            num_replicas=num_replicas,
            rank=rank,
            uneven=uneven,
            sharded=sharded,
            repeatable=repeatable,
            count=count,
            seeding=seeding,
            accumulate=accumulate,
        )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.collate_fn = requested.collate
        self.batch_sampler = batch_sampler
        self.generator = None
        source, self.sampler = source_of(requested)
        own_rank, self._world = rank_and_world(rank, num_replicas)
        self._follows = num_replicas is None and not isinstance(sampler, ResumableSampler)
        self._alike = not requested.iterable and not uneven

        def loader(requests: Any, seeds: torch.Generator) -> DataLoader[Any]:
            return DataLoader[Any](
                source.reader,  # type: ignore[arg-type]
                batch_size=None,
                sampler=requests,
                collate_fn=_as_it_is,
                generator=seeds,
                worker_init_fn=WorkerSetup(worker_init_fn, hide=requested.iterable and not sharded),
                num_workers=num_workers,
                pin_memory=pin_memory,
                timeout=timeout,
                multiprocessing_context=multiprocessing_context,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                pin_memory_device=pin_memory_device,
            )

        # Readers of samples by index put the generators back themselves.
        keeps = not num_workers and seeding != "none" and requested.iterable
        super().__init__(source, loader, rank=own_rank, accumulate=accumulate, ahead=ahead, keeps=keeps)

    @property
    def ended(self) -> bool:
        """True after the last batch of an epoch, on all ranks; never for iterable data sets, nor with ``uneven``."""
        return self._alike and (self._source.ends_here() if self._ahead is None else self._ahead.ended)

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch; raises TypeError for iterable data sets without a length."""
        return self._source.batches()

    def __iter__(self) -> Iterator[Any]:
        """The batches from the position to the end of the epoch.

        Raises:
            RuntimeError: At the next batch, if meanwhile another iteration has begun, or the position was set after
                the first batch. Before that the iteration begins where the position is by then: Lightning makes its
                iterator before it sets the epoch.
        """
        if self._follows:
            check_joined(self._rank, self._world)
        return self._iterate()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of another epoch. Epochs advance by themselves."""
        if epoch != self.epoch:
            self._source.set_epoch(epoch)

    @property
    def seed(self) -> int:
        """Seed of all random numbers."""
        return self._source.seed

    @public
    def set_seed(self, seed: int) -> None:
        """Continue at the same place in the order of another seed. Some samples repeat, others are lost.

        Raises:
            ConfigError: It is no whole number.
        """
        self._source.set_seed(seed)

    @public
    def skip(self, batches: int) -> None:
        """Read and discard batches of this rank, also of next epochs; an iteration before has ended.

        Args:
            batches: Number, equal on all ranks.

        Raises:
            ConfigError: It is no whole number, or an epoch has no batch.
        """
        left = whole("batches", batches)
        while left:
            before = left
            for _ in islice(self, left):
                left -= 1
            if left == before:
                raise ConfigError(f"{left} of {batches} batches to skip are left, and epoch {self.epoch} has none")
        common, own = self._states_now()
        # As after a resume: an accumulation begins again, and the loop has taken nothing yet.
        self.load_state_dict(common)
        if own:
            self.load_rank_state_dict(own)

    def state_dict(self) -> dict[str, Any]:
        """State of all ranks: a few numbers, which load with ``weights_only=True``."""
        return self._states()[0]

    @public
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called.

        Raises:
            ConfigError: The state does not fit this data set, number of ranks or workers.
        """
        self._source.load(state_dict)
        self._taken, self._ones = 0, int(BY_ONE in state_dict)
        if self._ones:
            self._served = self._source.jumps

    def rank_state_dict(self) -> dict[str, Any]:
        """State of this rank: empty, unless an iterable data set is sharded or has a state."""
        return self._states()[1]

    @public
    def load_rank_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of ``rank_state_dict``, after ``load_state_dict``.

        Raises:
            ConfigError: It is another rank's, or does not fit this data set.
        """
        self._source.load_own(state_dict)

    @public
    def used(self, batches: int = 1) -> None:
        """Count batches as used, with ``ahead=True``: after each step, before it is saved.

        Raises:
            ConfigError: More than are given and not used, or without ``ahead``.
        """
        if self._ahead is None:
            raise ConfigError("this loader counts batches as it hands them out: leave used() out, or give ahead=True")
        for states, ended in self._ahead.used(batches):
            self._count(ended, states)

    def __getattr__(self, name: str) -> Any:
        """Attributes of torch's DataLoader, as they were given."""
        # vars() and not hasattr: before __init__ has set it, this method would call itself for ever.
        if name in FORWARDED and "_loader" in vars(self):
            return getattr(self._loader, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _as_it_is(answer: Any) -> Any:
    # torch's DataLoader neither batches nor collates: each request is an index, for which a reader gives a whole batch.
    return answer
