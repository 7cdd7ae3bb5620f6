"""Batches of a source through torch's DataLoader, and the position after those that were handed out."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastckpt._core.data.generators import generators_kept
from fastckpt._core.memory.step_clock import fetching
from fastckpt.data.order import WORKERS
from fastckpt.data.source import Source, SourceAnswer
from fastckpt.data.splitmix import mix
from fastckpt.data.training_loops import Ahead, CycleWatch, States

logger = logging.getLogger("fastckpt")

BY_ONE = "by_one"
"""Key of a state after iterations of one batch each, as ``next(iter(loader))`` makes them: so is the next, then."""


class BatchStream:
    """Iterations over a source; its position counts batches that were handed out or used.

    Args:
        source: Gives requests, and takes how far their answers bring.
        loader: Makes torch's DataLoader of a sampler of requests, and a generator for the seeds of its workers.
        rank: This rank.
        accumulate: Batches per optimizer step.
        ahead: Whether the loop counts used batches by itself.
        keeps: Whether the generators of this process are put back after each batch.
    """

    def __init__(
        self,
        source: Source,
        loader: Callable[["_Requests", torch.Generator], DataLoader[Any]],
        *,
        rank: int,
        accumulate: int,
        ahead: bool,
        keeps: bool,
    ) -> None:
        self.accumulate = accumulate
        self._source, self._rank, self._keeps = source, rank, keeps
        self._seeds = torch.Generator()
        self._loader = loader(_Requests(source), self._seeds)
        self._ahead = Ahead() if ahead else None
        self._handed_out = 0
        self._passes = 0
        self._served = -1
        self._taken = self._ones = 0
        self._cycle_watch: CycleWatch | None = None
        self._looks_for_cycles = True
        self._is_cycled = False
        self._has_warned = False
        self._whole_step: tuple[int, States] = (-1, ({}, {}))

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._source.epoch

    @property
    def num_workers(self) -> int:
        """Loader workers."""
        return self._loader.num_workers

    def _iterate(self) -> Iterator[Any]:
        # A newer pass ends older iterators: two of them would count one position twice.
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
                "(docs/guides/data.md)"
            )
        self._taken = 0
        iterator = self._serve(self._ask(), self._now)
        self._cycle_watch = CycleWatch(iterator) if self._looks_for_cycles else None
        return iterator

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
        # torch draws the base seed of loader workers from this generator: fixed for each epoch, and not from the global
        # one, whose sequence training uses.
        self._seeds.manual_seed(mix(WORKERS, self._source.seed, self.epoch, self._rank))
        return iter(self._loader)

    def _serve(self, answers: Iterator[Any], begun: tuple[int, int]) -> Iterator[Any]:
        self._look_for_cycle(begun[0])
        # The position was set between iter() and the first batch, as Lightning does: begin where it is now.
        if begun[0] == self._passes and begun != self._now:
            answers, begun = self._ask(), self._now
        while True:
            if begun != self._now:
                raise RuntimeError(
                    "another iteration of this loader has begun, or its position was set: begin a new one"
                )
            with fetching(), self._generators():
                mark, batch = self._answer(answers)
            # DataLoader takes a StopIteration of the user's code for
            # the end of the epoch: samples would be lost silently.
            if mark is None and not self._source.ends_here():
                raise RuntimeError(
                    f"epoch {self.epoch} broke off before its end: the data set or collate_fn raised StopIteration"
                )
            # The position moves here, when the batch is handed out: prefetched batches never count.
            answer = SourceAnswer.END if mark is None else self._source.reached(mark)
            if answer is SourceAnswer.END:
                if not self._goes_round():
                    break
                self._end_epoch()
                answers, begun = self._ask(), self._now
            elif answer is None:
                # Before the yield: a loop that saves within its body must find the batch counted.
                self._hand_out()
                yield batch
        self._end_epoch()
        self._ones = self._taken = 0

    def _look_for_cycle(self, passes: int) -> None:
        """Look for an ``itertools.cycle`` when an iteration begins: later that would take long."""
        if passes == self._passes and self._cycle_watch is not None:
            self._is_cycled, self._cycle_watch = self._cycle_watch.is_cycled(), None

    def _goes_round(self) -> bool:
        """True if this iteration has no batch: it began at an epoch's end, and `itertools.cycle` ends with it."""
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
        """One more batch counts, with the position after it; the state moves when a whole step's are."""
        self._handed_out = 0 if epoch_ends else (self._handed_out + 1) % self.accumulate
        if (self.accumulate > 1 or states) and not self._handed_out:
            self._whole_step = self._source.jumps, states or self._states_now()

    def _answer(self, answers: Iterator[Any]) -> tuple[Any, Any]:
        """The next answer; twice None at the end.

        A worker's error carries the worker's stack as text. torch raises it in frames that refer to themselves and to
        the iterator. That would keep its workers until they are collected as garbage, and then wait 5 s for each.
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
    """A sampler for DataLoader: the requests to the workers."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._source.requests()
