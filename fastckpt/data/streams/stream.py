"""Iterable data sets that give the same stream in every process: the position is a number of samples of it."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from fastckpt._core.data.generators import generators_kept, seed_generators
from fastckpt._core.data.known_libraries import begin_epoch, share_epoch, visit_next_epoch
from fastckpt._core.data.position import DataPosition, read
from fastckpt._core.data.split import Split
from fastckpt.data.order import COLLATE, END, SAMPLE, STREAM
from fastckpt.data.source import Source, SourceAnswer
from fastckpt.data.splitmix import mix
from fastckpt.data.streams.checksum import checksum
from fastckpt.data.streams.trial import Judge, Trial, Tried, look, look_again
from fastckpt.errors import ConfigError


class StepRequest(NamedTuple):
    """The batch of this rank at a cursor, in an iteration that began at another: up to there samples were used.

    Attributes:
        last: The checksum of the sample that was used last; None if it is not compared.
    """

    seed: int
    epoch: int
    begun: int
    cursor: int
    last: int | None = None


class Step(NamedTuple):
    """The position after a batch.

    Attributes:
        after: The cursor after it; END if there is no batch.
        last: The checksum of the last sample that it uses on any rank.
        unlike: Whether the sample that was used last, before the iteration, is another one now.
    """

    after: Any
    last: int | None = None
    unlike: bool = False


class Stream:
    """A stream that is seeded sample by sample, from the first one on; samples that are not needed are skipped.

    Args:
        dataset: The user's iterable data set.
        seeded: Whether generators are set before each sample.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int, *, seeded: bool) -> None:
        self.at = 0
        self.key = (seed, epoch)
        self._seeded = seeded
        begin_epoch(dataset, epoch)
        if seeded:
            seed_generators(mix(STREAM, *self.key))
        self._samples = iter(dataset)

    def next(self, position: int) -> Any:
        """The next sample, with the generators of that position; END at the end."""
        if self._seeded:
            seed_generators(mix(SAMPLE, *self.key, position, 0))
        sample = next(self._samples, END)
        self.at += sample is not END
        return sample

    def skip_to(self, position: int) -> bool:
        """Pass over samples; False if the stream ends before."""
        while self.at < position:
            if self.next(self.at) is END:
                return False
        return True


class StreamReader:
    """Iterates the whole stream in each worker of each rank, and keeps the samples of the steps it is asked for.

    Args:
        dataset: The user's.
        collate: Makes a batch of a list of samples; of a single sample if not ``batched``.
        split: How ranks share a step.
        batched: Whether a batch is a list.
        seeded: Whether generators are set before each sample.
        compares: Whether the last sample of each step gets a checksum.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], split: Split, *, batched: bool, seeded: bool, compares: bool
    ) -> None:
        self.dataset = dataset
        self._compares = compares
        self._collate = collate
        self._split = split
        self._batched = batched
        self._seeded = seeded
        self._stream: Stream | None = None
        self.worker = 0

    def __getitem__(self, request: StepRequest | Trial) -> tuple[Any, Any]:
        """A batch, and how far it brings; no batch at the end, and for a trial."""
        if isinstance(request, Trial):
            return self._try(request), None
        try:
            return self._answer(request)
        except Exception:
            self._stream = None  # after an error it is at its end, though the data set is not
            raise

    def _try(self, trial: Trial) -> Tried:
        def opened() -> Callable[[int], Any]:
            return self._begin(trial.seed, trial.epoch).next

        with generators_kept():
            seen = look(opened)
            if trial.alone:
                visit_next_epoch(self.dataset, trial.epoch)
            return Tried(seen, look_again(opened))

    def _answer(self, request: StepRequest) -> tuple[Any, Any]:
        seed, epoch, begun, cursor, _ = request
        stream = self._stream
        # A stream cannot go back: one that is behind the cursor skips, one that is ahead is opened again.
        if stream is None or stream.key != (seed, epoch) or stream.at > cursor:
            stream = self._stream = self._begin(seed, epoch)
        # Before passing on to the cursor: the last used sample is on the way, and is read only once.
        unlike = self._is_unlike(stream, request)
        if not stream.skip_to(cursor):
            if stream.at < begun:
                raise ended_before(begun, stream.at)
            return Step(SourceAnswer.END, unlike=unlike), None
        samples, last = self._own(stream, cursor)
        length = stream.at  # it has ended there, or gave all that the step takes
        places = self._split.positions(cursor, length)
        if not places:
            return Step(SourceAnswer.END, unlike=unlike), None
        samples = samples[: len(places)] + self._padding(places, length, seed, epoch)
        if self._seeded:
            seed_generators(mix(COLLATE, seed, epoch, places[0], 0))
        after = cursor + self._split.taken(cursor, length)
        return Step(after, last, unlike), self._collate(samples if self._batched else samples[0])

    def _is_unlike(self, stream: Stream, request: StepRequest) -> bool:
        """Skip used samples; return whether the last of these is another one than it was."""
        place = request.begun - 1
        if request.last is None or stream.at > place or not stream.skip_to(place):
            return False
        sample = stream.next(place)
        return sample is not END and checksum(sample) != request.last

    def _own(self, stream: Stream, cursor: int) -> tuple[list[Any], int | None]:
        """This rank's samples of the step at the cursor, fewer if the stream ends; and the last of all's checksum."""
        samples: list[Any] = []
        last: Any = None
        # All ranks' samples of the step are drawn, so that the stream is at the same place on each.
        for i in range(self._split.world * self._split.batch):
            sample = stream.next(cursor + i)
            if sample is END:
                break
            last = sample
            if i % self._split.world == self._split.rank:
                samples.append(sample)
        return samples, checksum(last) if self._compares else None

    def _padding(self, places: range, length: int, seed: int, epoch: int) -> list[Any]:
        """Samples that fill up the last row: those at the beginning of the stream, read once more."""
        beyond = [place for place in places if place >= length]
        if not beyond:
            return []
        stream = self._begin(seed, epoch)
        stream.skip_to(beyond[0] % length)
        sample = stream.next(beyond[0])
        if sample is END:
            raise ConfigError(
                f"{type(self.dataset).__name__} gives nothing when it is iterated again: the last step cannot be "
                "filled up from its beginning. Have __iter__ begin again, or pass drop_last=True or uneven=True"
            )
        return [sample]

    def _begin(self, seed: int, epoch: int) -> Stream:
        return Stream(self.dataset, seed, epoch, seeded=self._seeded)


def ended_before(used: int, length: int) -> ConfigError:
    """The error to raise if data that were used are missing."""
    return ConfigError(
        f"{used} samples of the stream were used, but it has {length} only: what is left of the epoch would be lost. "
        "Give the data set that the position was saved with, or call set_epoch() to begin another epoch"
    )


class Streamed(Source):
    """The position in a stream.

    Args:
        reader: The workers' reader.
        split: How ranks share it.
        position: Where to begin.
        judge: Of the trial at the first start.
        workers: As many as there are; 1 without.
    """

    def __init__(self, reader: StreamReader, split: Split, position: DataPosition, judge: Judge, workers: int) -> None:
        super().__init__(reader, position)
        self._split, self._judge, self._workers = split, judge, workers
        self._last: tuple[int, int, int | None] = (0, 0, None)

    def requests(self) -> Iterator[StepRequest | Trial]:
        """One for each step from the position on; the end is not known. Before them, perhaps a trial."""
        seed, epoch, begun = self._position.seed, self.epoch, self._position.cursor
        share_epoch(self.reader.dataset, epoch, self._workers)
        yield from self._judge.ask(seed, epoch, self._workers)
        last = self._checksum if self._judge.compares else None
        for cursor in count(begun, self._split.world * self._split.batch):
            yield StepRequest(seed, epoch, begun, cursor, last)

    def reached(self, mark: Step | Tried) -> SourceAnswer | None:
        """Move the cursor there."""
        if isinstance(mark, Tried):
            self._judge.judge(mark)
            return SourceAnswer.NOTHING
        if mark.unlike:
            self._judge.warn(f"sample {self._last[1] - 1} of epoch {self._last[0]}")
        if mark.after is SourceAnswer.END:
            return SourceAnswer.END
        self._position.cursor = mark.after
        self._last = (self.epoch, mark.after, mark.last)
        return None

    def batches(self) -> int:
        """Batches of this rank in a whole epoch, if the data set has a length; raises TypeError otherwise."""
        return self._split.steps(len(self.reader.dataset))

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The position is common to all ranks, and so is the last sample of it."""
        last = {} if self._checksum is None else {"checksum": self._checksum}
        return self._position.state(0, 0) | last, {}

    def load(self, common: Mapping[str, Any]) -> None:
        """Take over the position; raises ConfigError if it is one of data with indices."""
        numbers = read(common, ("cursor", "length"))
        if numbers["cursor"] and numbers["length"]:
            raise ConfigError(f"the position is one in a data set of {numbers['length']} samples; this one is iterable")
        last = read(common, ("checksum",))["checksum"] if "checksum" in common else None
        self._position.load(common)
        self._last = (self.epoch, numbers["cursor"], last)
        self._judge.resumed()

    @property
    def _checksum(self) -> int | None:
        """Checksum of the last sample before the cursor, if it is known: earlier versions did not save it."""
        epoch, cursor, last = self._last
        return last if (epoch, cursor) == (self.epoch, self._position.cursor) and cursor else None
