"""The position of a job in its data: one cursor that is equal on all ranks."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

VERSION = 1


@dataclass
class DataPosition:
    """An epoch, and the number of its samples that committed steps have used, on all ranks together.

    Attributes:
        seed: The seed of all orders.
        epoch: From 0.
        cursor: Samples used.
        jumps: Counts the times that the position was set, so that an iteration under way notices.
    """

    seed: int
    epoch: int = 0
    cursor: int = 0
    jumps: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        whole("seed", self.seed, -(2**63), 2**63)

    def jump(self, epoch: int, cursor: int = 0) -> None:
        """Set the position."""
        self.epoch, self.cursor = whole("epoch", epoch), whole("cursor", cursor)
        # An iterator under way compares this number: a position that was set must not be moved on by its old batches.
        self.jumps += 1

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; warns of going back from the middle, as scripts do that forget to resume."""
        if whole("epoch", epoch) < self.epoch and self.cursor:
            logger.warning(
                "set_epoch(%d) goes back from sample %d of epoch %d: its data are used again. To go on after a resume, "
                "begin with the epoch of the loader",
                epoch,
                self.cursor,
                self.epoch,
            )
        self.jump(epoch)

    def set_seed(self, seed: int) -> None:
        """Have all random numbers follow from another seed, from this place on."""
        self.seed = whole("seed", seed, -(2**63), 2**63)
        self.jump(self.epoch, self.cursor)

    def end_epoch(self) -> None:
        """Go on to the next one."""
        self.epoch, self.cursor = self.epoch + 1, 0

    def state(self, length: int, order: int) -> dict[str, int]:
        """The position as a checkpoint has it.

        Args:
            length: Samples of the epoch; 0 if unknown.
            order: A number that distinguishes this order from others.
        """
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "length": length,
            "order": order,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Set position and seed to a result of `state`.

        Raises:
            ConfigError: It is no such state.
        """
        numbers = read(state, ("seed", "epoch", "cursor", "length", "order"))
        if numbers["seed"] != self.seed:
            logger.warning("data continues in the saved order, with seed %d instead of %d", numbers["seed"], self.seed)
        self.seed = numbers["seed"]
        self.jump(numbers["epoch"], numbers["cursor"])


def read(state: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """These numbers of a saved state; raises ConfigError if one is missing, or it is of another version."""
    if "version" not in state:
        raise ConfigError(
            f"the state of the data has no version, but {', '.join(map(repr, state)) or 'nothing'}: give "
            "what state_dict() of a ResumableDataLoader or ResumableSampler returned"
        )
    if state["version"] != VERSION:
        raise ConfigError(f"the state of the data has version {state.get('version')!r}; this fastckpt reads {VERSION}")
    if missing := [name for name in names if name not in state]:
        raise ConfigError(
            f"the state of the data has no {' and no '.join(missing)}: give the kind of data set and "
            "loader that it was saved with"
        )
    return {name: whole(name, state[name], -(2**63)) for name in names}


def nothing_own(own: Mapping[str, Any]) -> None:
    """Raise ConfigError if a rank has saved a state of its own, where all ranks are at one position."""
    if own:
        raise ConfigError(
            f"all ranks are at one position here, but one per rank was saved: {', '.join(own)}. "
            "Give the data set that it was saved with, and sharded=True if it shards itself"
        )


def whole(name: str, value: Any, low: int = 0, end: int = 2**63) -> int:
    """``value``, if it is a whole number from ``low`` on below ``end``; raises ConfigError otherwise."""
    # bool is an int to Python, and True as a cursor would pass for 1.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < end:
        raise ConfigError(f"{name} is {value!r}; give a whole number from {low} to {end - 1}")
    return value
