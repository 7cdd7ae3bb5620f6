"""The trial of a stream at the first start: whether another opening, and its own state, give the same samples."""

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from fastckpt._core.config import RankInfo
from fastckpt._core.data.known_libraries import lacks_seed, remedy
from fastckpt._core.data.split import Split
from fastckpt._core.error_codes import coded
from fastckpt._core.torch_private.tensors import default_store
from fastckpt.data.order import END
from fastckpt.data.streams.checksum import checksum
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

SAMPLES = 32
"""Samples that are compared."""
MIDDLE = 7
"""Samples before a state that is tried; another follows a sample later: a buffer may be used up at one."""
PATIENCE = 10.0
"""Seconds until the log reports that a second opening is waited for."""

_made: Counter[tuple[str, int]] = Counter()
"""Loaders of streams of a kind that this process has made: all ranks make the same in the same order."""


class Trial(NamedTuple):
    """Asks a worker to open its stream twice.

    Attributes:
        alone: Whether no other worker of this rank does: then it visits the next epoch between.
    """

    seed: int
    epoch: int
    alone: bool


class Seen(NamedTuple):
    """The beginning of a stream.

    Attributes:
        samples: A checksum of each.
        error: The data set's error after them; empty for none. It comes again where the sample is used.
    """

    samples: list[int]
    error: str = ""

    def differs(self, other: "Seen") -> int | None:
        """The number of the first sample that is another one there; None if they are alike up to the first error.

        One that raises at once though this does not cannot be opened.
        """
        if other.error and not other.samples and self.samples:
            return 0
        ends = [len(seen.samples) for seen in (self, other) if seen.error] or [SAMPLES]
        pairs = itertools.zip_longest(self.samples[: min(ends)], other.samples[: min(ends)])
        return next((number for number, (here, there) in enumerate(pairs) if here != there), None)


class Tried(NamedTuple):
    """The finding of a loader worker: two openings, and whether the data set's own state leads elsewhere."""

    seen: Seen
    again: Seen
    lossy: bool = False


class _Kept:
    """Keeps the error of a data set."""

    error: Exception | None = None

    def __enter__(self) -> "_Kept":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


def look(opened: Callable[[], Callable[[int], Any]], first: int = 0) -> Seen:
    """The samples of a stream from a number on.

    Args:
        opened: Opens the stream, and returns a function that draws the sample of a number.
        first: That of the first one drawn.
    """
    samples: list[int] = []
    with _Kept() as kept:
        draw = opened()
        for number in range(first, SAMPLES):
            if (sample := draw(number)) is END:
                break
            samples.append(checksum(sample))
    return Seen(samples, "" if kept.error is None else f"{type(kept.error).__name__}: {kept.error}")


def look_again(opened: Callable[[], Callable[[int], Any]]) -> Seen:
    """The same for a second opening, which some streams never give: the log then reports the wait."""
    warning = threading.Timer(
        PATIENCE,
        logger.warning,
        (
            "the stream is being opened a second time, to see that it gives the same samples, and has given none for "
            "%g s: if it can be opened once only, pass repeatable=False",
            PATIENCE,
        ),
    )
    warning.daemon = True
    warning.start()
    try:
        return look(opened)
    finally:
        warning.cancel()


class Judge:
    """Asks for trials at the first start, and judges their outcome.

    Args:
        dataset: The user's.
        split: Rank and world.
        repeatable: None to find out, True to believe it, False not to need it.
        alike: Whether all workers and ranks read the same stream.
        everyone: Whether the ranks are those of the process group.
    """

    def __init__(self, dataset: Any, split: Split, repeatable: bool | None, *, alike: bool, everyone: bool) -> None:
        self._dataset, self._split = dataset, split
        self._name = type(dataset).__name__
        self._compares = repeatable is not False
        self._due = repeatable is None
        self._alike, self._everyone = alike, everyone
        self._seen: Seen | None = None
        self._has_warned = False
        _made[self._name, split.world] += 1
        self._number = _made[self._name, split.world]
        if repeatable is False and not split.rank:
            logger.warning(
                "%s need not give the same samples at each start (repeatable=False): a resume passes over as many "
                "samples as were used, so some may be lost and others used twice%s",
                self._name,
                "; so it is without one, if ranks read unlike streams" if alike and split.world > 1 else "",
            )

    @property
    def compares(self) -> bool:
        """True if the last sample is compared when a resume passes over it."""
        return self._compares

    def resumed(self) -> None:
        """A position was loaded: nothing is refused any more."""
        self._due = False

    def ask(self, seed: int, epoch: int, workers: int) -> list[Trial]:
        """One request for each worker, at the first iteration of the first start."""
        due, self._due = self._due, False
        if due and lacks_seed(self._dataset):
            raise ConfigError(
                coded(
                    f"{self._name} is shuffled without a seed, so each start and each rank has another order: samples "
                    f"would be lost, and others used twice. {remedy(self._dataset)}; to accept that, pass "
                    "repeatable=False",
                    "FC-041",
                )
            )
        return [Trial(seed, epoch, workers == 1)] * workers if due else []

    def judge(self, tried: Tried) -> None:
        """Raise ConfigError unless a resume would find the samples again, and all ranks read the same."""
        # Openings of one worker first, then ranks, then workers: the message names the nearest cause.
        self._refuse(tried.seen, tried.again, "when it is opened again")
        if not self._alike:
            return
        if self._seen is None:
            self._seen = tried.seen
            if self._has_others and not tried.seen.error:
                others = Seen(_of_all_ranks(self._key, tried.seen.samples))
                self._refuse(others, tried.seen, f"on rank {self._split.rank} than on others")
        self._refuse(self._seen, tried.seen, "in another loader worker")

    def warn(self, place: str) -> None:
        """Warn once that the sample used last is another one now."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                coded(
                    "rank %d: %s of %s is not the one that was used before the restart: the stream differs between "
                    "starts, so some of its samples are lost and others used twice. %s; to accept that, pass "
                    "repeatable=False",
                    "FC-041",
                ),
                self._split.rank,
                place,
                self._name,
                remedy(self._dataset),
            )

    @property
    def _has_others(self) -> bool:
        return self._everyone and self._split.world > 1 and dist.is_available() and dist.is_initialized()

    @property
    def _key(self) -> str:
        """Key of this loader in this start of the job: torchrun keeps its store while it restarts workers."""
        restarts = RankInfo.from_environment().restart_count
        return f"{restarts}/{self._name}/{self._split.world}/{self._split.batch}/{self._number}"

    def _refuse(self, seen: Seen, again: Seen, where: str) -> None:
        if (number := seen.differs(again)) is None:
            return
        here, there = (len(each.samples) > number for each in (seen, again))
        what = "is another one" if here and there else f"is missing there ({again.error or 'the stream has ended'})"
        what = "comes after the end" if there and not here else what
        raise ConfigError(
            coded(
                f"{self._name} gives other samples {where}: sample {number} {what}. Some would be lost, and others "
                f"used twice. {remedy(self._dataset)}; to accept that, pass repeatable=False",
                "FC-041",
            )
        )


def _of_all_ranks(key: str, samples: list[int]) -> list[int]:
    """The finding of the first rank to arrive. No rank waits: one may iterate late, or never."""
    store = dist.distributed_c10d.PrefixStore("fastckpt/stream", default_store())
    # compare_set of c10d's store sets the value if there is none, and returns the value: one request, no wait.
    return [int(each) for each in store.compare_set(key, "", " ".join(map(str, samples)) or " ").decode().split()]
