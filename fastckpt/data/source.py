"""What a loader needs to know of a kind of data: what to ask its workers for, and how far their answers bring it."""

import enum
from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class SourceAnswer(enum.Enum):
    """What a worker says instead of giving a batch."""

    NOTHING = "no batch this time"
    END = "no batch any more"


class SourceReader(Protocol):
    """The part that lives in the workers: a data set whose indices are requests.

    Attributes:
        dataset: The user's.
        worker: The number of the loader worker; 0 in the main process.
    """

    dataset: Any
    worker: int

    def __getitem__(self, request: Any) -> tuple[Any, Any]:
        """A batch and how far it brings; an `SourceAnswer` as the latter if there is none."""


class Source(Protocol):
    """The part that lives in the main process: it keeps the position."""

    @property
    def reader(self) -> SourceReader:
        """What the workers get."""

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""

    @property
    def seed(self) -> int:
        """From which all random numbers follow."""

    @property
    def jumps(self) -> int:
        """Counts the times that somebody set the position."""

    def requests(self) -> Iterator[Any]:
        """From the position to the end of the epoch; endless if nobody knows where that is."""

    def reached(self, mark: Any) -> SourceAnswer | None:
        """Move to where an answer brings; None if it came with a batch."""

    def ends_here(self) -> bool:
        """Whether the epoch is known to have no batch left."""

    def end_epoch(self) -> None:
        """Go on to the beginning of the next one."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""

    def batches(self) -> int:
        """Batches of this rank in a whole epoch."""

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What all ranks have in common, and what this one has beside it."""

    def load(self, common: Mapping[str, Any]) -> None:
        """Take over what was common."""

    def load_own(self, own: Mapping[str, Any]) -> None:
        """Take over this rank's part."""
