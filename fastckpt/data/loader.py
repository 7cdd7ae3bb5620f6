"""A data loader that continues: DataLoader's arguments, and a position that a checkpoint saves."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader, IterableDataset

from fastckpt._core.arguments import public
from fastckpt._core.data.generators import generators_kept
from fastckpt._core.data.split import check_joined, rank_and_world
from fastckpt.data.factory import collate_of, source_of
from fastckpt.data.loader_options import FORWARDED, LoaderOptions, RequestedLoader
from fastckpt.data.loader_worker import WorkerSetup
from fastckpt.data.order import WORKERS
from fastckpt.data.sampler import ResumableSampler
from fastckpt.data.source import Source, SourceAnswer
from fastckpt.data.splitmix import mix
from fastckpt.data.training_loops import Ahead, CycleWatch, States
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

BY_ONE = "by_one"
"""Says that each iteration takes one batch, as ``next(iter(loader))`` does: a resume at an epoch's end has one, too."""


class ResumableDataLoader:
    """Replaces ``DataLoader(dataset, sampler=DistributedSampler(dataset))``; a resumed job goes on with its next batch.

    The position counts every batch that was handed out, and none that workers hold ready: saved at the end of a step,
    it leads to the batch of the next. Iterating goes on from the position; at the end of an epoch it moves on to the
    next by itself. docs/data.md says what happens in every case.

    Args:
        dataset: With indices, or iterable.
        batch_size: Samples per batch and rank; None for samples one by one.
        shuffle: Whether to shuffle each epoch anew.
        seed: Fits into 64 bits with sign, equal on all ranks; with epoch and length it decides the order, and with
            the place in the epoch the random numbers of each sample.
        drop_last: Drop the end of an epoch, if it is less than a whole batch for every rank. Otherwise it is handed
            out, filled up from the beginning of the epoch so that all ranks get equally many samples.
        **options: ``sampler``, ``batch_sampler``, ``num_workers``, ``collate_fn``, ``pin_memory``, ``timeout``,
            ``worker_init_fn``, ``multiprocessing_context``, ``prefetch_factor``, ``persistent_workers``: as those of
            DataLoader. ``num_replicas``, ``rank``: by default those of torch.distributed, or of the launcher.
            ``uneven``: hand out the end of an epoch without filling it up. ``sharded``: an iterable data set chooses
            by itself what each rank and worker gets. ``repeatable``: whether an iterable data set gives the same
            samples at each start and on each rank; None (default) tries that at the first start, True believes it,
            False accepts that some are lost. ``count``: pass over the samples that were used, though an iterable data
            set has a state; None (default) does so if that is lossy. ``seeding``: "sample" (default) seeds the
            generators before each sample, "batch" before each batch, "none" not at all. ``accumulate``: batches per
            optimizer step; the state then is that of the last whole step. A `Checkpointer` sees updates itself, and
            waits for them. ``ahead``: the loop fetches batches ahead; the state is that of what `used` counted.

    Raises:
        ConfigError: Arguments do not go together, or would make an order that cannot be continued.

    Attributes:
        sampler: A `ResumableSampler` with the same position; None for other samplers and iterable data sets.
    """

    @public
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        **options: Unpack[LoaderOptions],
    ) -> None:
        wish = RequestedLoader(dataset, batch_size, bool(shuffle), seed, drop_last, options)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._source: Source
        self._source, self.sampler = source_of(wish)
        # Readers of samples by index put the generators back themselves.
        self._keeps = not wish.get("num_workers", 0) and wish.get("seeding", "sample") != "none" and wish.iterable
        self._seeds = torch.Generator()
        self._rank, self._world = rank_and_world(wish.get("rank"), wish.get("num_replicas"))
        self._follows = wish.get("num_replicas") is None and not isinstance(wish.get("sampler"), ResumableSampler)
        self._alike = not isinstance(dataset, IterableDataset) and not wish.get("uneven")
        self.collate_fn = collate_of(wish)
        self.batch_sampler = wish.get("batch_sampler")
        self.generator = None
        self.accumulate = wish.get("accumulate", 1)
        self._ahead = Ahead() if wish.get("ahead") else None
        self._handed_out = 0
        self._passes = 0
        self._served = -1
        self._taken = self._ones = 0
        self._cycle_watch: CycleWatch | None = None
        self._looks_for_cycles = True
        self._is_cycled = False
        self._has_warned = False
        self._whole_step: tuple[int, States] = (-1, ({}, {}))
        hides = isinstance(dataset, IterableDataset) and not wish.get("sharded")
        self._loader = DataLoader[Any](
            self._source.reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=_Requests(self._source),
            collate_fn=_as_it_is,
            generator=self._seeds,
            worker_init_fn=WorkerSetup(wish.get("worker_init_fn"), hide=hides),
            **{name: options[name] for name in FORWARDED if name in options},  # type: ignore[literal-required]
        )

    @property
    def epoch(self) -> int:
        """The epoch, from 0: after a resume, that in which to go on."""
        return self._source.epoch

    @property
    def ended(self) -> bool:
        """Whether the batch handed out last was the last of the epoch, on all ranks alike.

        Never for iterable data sets, whose end nobody knows before, nor with ``uneven``, where ranks end apart.
        """
        return self._alike and (self._source.ends_here() if self._ahead is None else self._ahead.ended)

    @property
    def num_workers(self) -> int:
        """Loader workers."""
        return self._loader.num_workers

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch; raises TypeError for iterable data sets without a length."""
        return self._source.batches()

    def __iter__(self) -> Iterator[Any]:
        """The batches from the position to the end of the epoch.

        Raises:
            RuntimeError: At the next batch, if meanwhile another iteration has begun, or the position was set after
                the first batch. Before that the iteration begins where the position is by then: Lightning makes its
                iterator before it tells the epoch.
        """
        if self._follows:
            check_joined(self._rank, self._world)
        self._passes += 1
        if self._ahead is not None and self._served == self._source.jumps and not self._source.ends_here():
            self._ahead.clear()
        self._ones += self._taken == 1
        if self._served == self._source.jumps and self._source.ends_here():
            self._end_epoch()  # a loop took the last batch, and did not ask for one more
        elif self._taken == 1 and self._served == self._source.jumps and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the iteration before took one batch and no more: that is used up, as by next(iter(loader)), and this "
                "one begins with the batch after it. To look at a batch, keep state_dict(), and load it again "
                "(docs/data.md)"
            )
        self._taken = 0
        iterator = self._serve(self._ask(), self._now)
        self._cycle_watch = CycleWatch(iterator) if self._looks_for_cycles else None
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; does nothing if that is the present one. Epochs advance by themselves."""
        if epoch != self.epoch:
            self._source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have in common: a few numbers, which load with ``weights_only=True``."""
        return self._states()[0]

    @public
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            ConfigError: It is no such state, or means nothing with this data set, world or number of workers.
        """
        self._source.load(state_dict)
        self._taken, self._ones = 0, int(BY_ONE in state_dict)
        if self._ones:
            self._served = self._source.jumps

    def rank_state_dict(self) -> dict[str, Any]:
        """What this rank has beside it: empty, unless an iterable data set is sharded or has a state of its own."""
        return self._states()[1]

    @public
    def load_rank_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `rank_state_dict` gave on this rank, after `load_state_dict`.

        Raises:
            ConfigError: It is another rank's, or does not fit this data set.
        """
        self._source.load_own(state_dict)

    @public
    def used(self, batches: int = 1) -> None:
        """Count batches as used, with ``ahead=True``: call it after each step, before it is saved.

        Raises:
            ConfigError: Fewer are handed out and not used, or the loader counts them as it hands them out.
        """
        if self._ahead is None:
            raise ConfigError("this loader counts batches as it hands them out: leave used() out, or give ahead=True")
        for states, ended in self._ahead.used(batches):
            self._count(ended, states)

    def __getattr__(self, name: str) -> Any:
        """What was given for torch's DataLoader, under its names."""
        if name in FORWARDED and "_loader" in vars(self):
            return getattr(self._loader, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _now(self) -> tuple[int, int]:
        return self._passes, self._source.jumps

    def _states_now(self) -> States:
        common, own = self._source.states()
        return common | {BY_ONE: 1} if self._ones and self._taken <= 1 else common, own

    def _states(self) -> States:
        if self._ahead is not None:
            self._ahead.check()
        jumps, states = self._whole_step
        lags = self.accumulate > 1 or self._ahead is not None
        return states if lags and jumps == self._source.jumps else self._states_now()

    def _ask(self) -> Iterator[Any]:
        """Have the workers begin at the position."""
        if self._whole_step[0] != self._source.jumps:
            self._handed_out, self._whole_step = 0, (self._source.jumps, self._states_now())
            if self._ahead is not None:
                self._ahead.clear()
        self._seeds.manual_seed(mix(WORKERS, self._source.seed, self.epoch, self._rank))
        return iter(self._loader)

    def _serve(self, answers: Iterator[Any], begun: tuple[int, int]) -> Iterator[Any]:
        self._look_for_cycle(begun[0])
        if begun[0] == self._passes and begun != self._now:
            answers, begun = self._ask(), self._now
        while True:
            if begun != self._now:
                raise RuntimeError(
                    "another iteration of this loader has begun, or its position was set: begin a new one"
                )
            with self._generators():
                mark, batch = self._answer(answers)
            if mark is None and not self._source.ends_here():
                raise RuntimeError(
                    f"epoch {self.epoch} broke off before its end: the data set or collate_fn raised StopIteration"
                )
            said = SourceAnswer.END if mark is None else self._source.reached(mark)
            if said is SourceAnswer.END:
                if not self._goes_round():
                    break
                self._end_epoch()
                answers, begun = self._ask(), self._now
            elif said is None:
                self._hand_out()
                yield batch
        self._end_epoch()
        self._ones = self._taken = 0

    def _look_for_cycle(self, passes: int) -> None:
        """Where an iteration begins: later that would take long."""
        if passes == self._passes and self._cycle_watch is not None:
            self._is_cycled, self._cycle_watch = self._cycle_watch.is_cycled(), None

    def _goes_round(self) -> bool:
        """Whether this iteration has no batch, for it began at an epoch's end, and `itertools.cycle` ends with it."""
        if not self._looks_for_cycles:
            return False
        self._looks_for_cycles = False
        if not self._is_cycled:
            return False
        logger.warning(
            "itertools.cycle keeps the batches of the first epoch, and repeats them in their order: the position stays "
            "at the end of that epoch, and a resume goes on with the next. Loop with `while True: yield from loader`"
        )
        return not self._taken

    def _hand_out(self) -> None:
        self._served = self._source.jumps
        self._taken += 1
        if self._taken > 1:
            self._ones = 0
        ends = self._source.ends_here()
        if self._ahead is None:
            self._count(ends)
        else:
            self._ahead.handed_out(self._states_now(), ended=ends)

    def _end_epoch(self) -> None:
        self._source.end_epoch()
        self._served = -1
        if self._ahead is None:
            self._count(True)
        else:
            self._ahead.passed()

    def _count(self, epoch_ends: bool, states: States | None = None) -> None:
        """One more batch counts, with the position behind it; the state moves when a whole step's are."""
        self._handed_out = 0 if epoch_ends else (self._handed_out + 1) % self.accumulate
        if (self.accumulate > 1 or states) and not self._handed_out:
            self._whole_step = self._source.jumps, states or self._states_now()

    def _answer(self, answers: Iterator[Any]) -> tuple[Any, Any]:
        """The next answer; twice None at the end.

        What a worker raised carries the worker's stack as text. torch raises it in frames that refer to themselves and
        to the iterator, which would keep its workers until they are found as garbage, and then wait 5 s for each.
        """
        try:
            mark, batch = next(answers)
        except Exception as error:
            if self.num_workers:
                error.with_traceback(None)
            if isinstance(error, StopIteration):
                return None, None
            raise
        return mark, batch

    def _generators(self) -> AbstractContextManager[None]:
        return generators_kept() if self._keeps else nullcontext()


class _Requests:
    """A sampler for DataLoader: what to ask the workers for."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._source.requests()


def _as_it_is(answer: Any) -> Any:
    return answer
