"""Sources of a loader: requests to its workers, and how far their answers bring the position."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from fastckpt._core.data.position import DataPosition, nothing_own


class SourceAnswer(enum.Enum):
    """The answer of a worker without a batch."""

    NOTHING = "no batch this time"
    END = "no batch any more"


class SourceReader(Protocol):
    """The part in the workers: a data set with requests as its indices.

    Attributes:
        dataset: The user's.
        worker: The number of the loader worker; 0 in the main process.
    """

    dataset: Any
    worker: int

    def __getitem__(self, request: Any) -> tuple[Any, Any]:
        """A batch and how far it brings; an `SourceAnswer` as the latter if there is none."""


class Source(ABC):
    """The part that lives in the main process: it keeps the position, here one cursor for all ranks.

    Args:
        reader: The workers' reader.
        position: Where to begin.
    """

    def __init__(self, reader: SourceReader, position: DataPosition) -> None:
        self.reader = reader
        self._position = position

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._position.epoch

    @property
    def seed(self) -> int:
        """Seed of all random numbers."""
        return self._position.seed

    def set_seed(self, seed: int) -> None:
        """Go on at the same place, in the order of another seed."""
        self._position.set_seed(seed)

    @property
    def jumps(self) -> int:
        """Counts the times that the position was set."""
        return self._position.jumps

    @abstractmethod
    def requests(self) -> Iterator[Any]:
        """Yield requests from the position to the end of the epoch; endless if that is not known."""

    @abstractmethod
    def reached(self, mark: Any) -> SourceAnswer | None:
        """Move to where an answer brings; None if it came with a batch."""

    def ends_here(self) -> bool:
        """True if the epoch is known to have no batch left: never of a stream."""
        return False

    def end_epoch(self) -> None:
        """Go on to the beginning of the next one."""
        self._position.end_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._position.set_epoch(epoch)

    @abstractmethod
    def batches(self) -> int:
        """Batches of this rank in a whole epoch; raises TypeError if that is not known."""

    @abstractmethod
    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """State common to all ranks, and this rank's own."""

    @abstractmethod
    def load(self, common: Mapping[str, Any]) -> None:
        """Take over the common part; raises ConfigError if it does not fit."""

    def load_own(self, own: Mapping[str, Any]) -> None:
        """Take over this rank's part; raises ConfigError if there should be none."""
        nothing_own(own)
