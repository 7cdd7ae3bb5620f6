"""What a rank saved for itself, which says why something is not there."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from fastckpt.errors import NoRankState


class RankState(dict[str, Any]):
    """A dict whose KeyError tells what belongs elsewhere.

    Args:
        state: What this rank saved; empty if it was no rank of the job that saved.
        rank: This rank.
        step: What was loaded.
    """

    def __init__(self, state: Mapping[str, Any], rank: int, step: int) -> None:
        super().__init__(state)
        self._rank, self._step = rank, step

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()], None, None, Iterator[tuple[str, Any]]]:
        """As an OrderedDict: what a user saves in a file of their own is to load with ``weights_only=True``."""
        return OrderedDict, (), None, None, iter(self.items())

    def __missing__(self, name: str) -> NoReturn:
        """Raise NoRankState."""
        there = ", ".join(map(repr, self)) or "nothing"
        raise NoRankState(
            f"rank_state has no {name!r}: of step {self._step} rank {self._rank} has {there}. What a job with another "
            "number of ranks needs, such as the position of a ResumableDataLoader, belongs into the common state: "
            f"save_checkpoint(step, {{..., {name!r}: loader.state_dict()}}), and load_checkpoint()[{name!r}]"
        )
