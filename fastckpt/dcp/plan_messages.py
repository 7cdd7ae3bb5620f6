"""Messages by which ranks plan their saves together, and a rank's knowledge of such a plan."""

import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from fastckpt._core.client.job_store import JobRanks
from fastckpt._core.client.mailbox import StoreMailbox
from fastckpt._core.format.distcp import ShardLocation
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.plan import Plan
from fastckpt.dcp.flattening import FlatItem
from fastckpt.dcp.known_classes import unpickled
from fastckpt.errors import FastckptError

_RUNG = "rung"


class Stage(StrEnum):
    """Stages of a plan; a bell, on which ranks wait, rings at the end of each."""

    OFFERED = "offered"
    ASSIGNED = "assigned"
    LAID_OUT = "laid out"
    DESCRIBED = "described"


class Overtaken(Exception):
    """A message that was waited for is not needed any more."""


class PlanMailbox(StoreMailbox):
    """Messages of the parts of a `SavePlan`, by the numbers of plans.

    A rank waits for a message of a plan, or for the word that another plan is called for, whichever comes first. The
    store can wait for all of several keys only, and one that all ranks poll does nothing else. So each stage of a plan
    has a bell. This key is set when the messages of the stage are there, or when another plan is called for: then there
    is nothing to wait for.
    """

    def encode(self, message: Any) -> bytes:
        """A pickle, as JSON has no plans."""
        return pickle.dumps(message)

    def decode(self, data: bytes) -> Any:
        """The message; raises UnpicklingError for data that is no part of a plan."""
        return unpickled(io.BytesIO(data), "a message of another rank")

    def ring(self, number: int, stage: Stage) -> None:
        """Wake all that wait for the end of a stage: its messages were put."""
        self.replace_word(_bell(number, stage), _RUNG)

    def count(self, number: int, stage: Stage, ranks: int) -> None:
        """Note that this rank has put its message; wakes those that wait when all ranks have."""
        if self.add(f"{number}/count/{stage}") >= ranks:
            self.ring(number, stage)

    def receive(self, number: int, stage: Stage, what: Sequence[str], end: float, unless: str) -> list[Any]:
        """Messages of a plan, once they are there.

        Args:
            number: Of the plan.
            stage: They are put at its end.
            what: Their keys within the plan.
            end: When to wait no longer, by time.monotonic.
            unless: A word that makes the messages needless; empty for none.

        Raises:
            TimeoutError: They have not come.
            Overtaken: The other word was left first.
        """
        keys = [f"{number}/{each}" for each in what]

        def check() -> None:
            if unless and self.has(unless) and not self.has(*keys):
                raise Overtaken(unless)

        if unless:
            self.wait([_bell(number, stage)], end, check)
        if not (unless and self.has(*keys)):
            check()
            self.wait(keys, end, check)
        return self.read_all(keys)

    def barrier(self, number: int, key: str, ranks: int, end: float, unless: str) -> None:
        """Return when all ranks have called this; raises as `receive`."""
        count = self.add(key)
        if count >= ranks:
            self.replace_word(_full(key), _RUNG)
            self.replace_word(_bell_of(key), _RUNG)
            return
        if count == 1:
            self.replace_word(_meeting(number), key)

        def check() -> None:
            if unless and self.has(unless) and not self.has(_full(key)):
                raise Overtaken(unless)

        if unless:
            check()  # whoever has called for another plan before may not have known of this meeting
            self.wait([_bell_of(key)], end, check)
            check()
        self.wait([_full(key)], end, check)

    def overtake(self, number: int) -> None:
        """Wake all that wait for anything of a plan, after the word that makes it needless was left."""
        for stage in Stage:
            self.ring(number, stage)
        if (meeting := self.word(_meeting(number))) is not None:
            self.replace_word(_bell_of(meeting), _RUNG)

    def clear(self, number: int, nodes: Iterable[int]) -> None:
        """Remove messages for which no rank waits any more, because all have begun another plan."""
        for key in ("metadata", *(f"index/{node}" for node in nodes)):
            self.remove(f"{number}/{key}")
        for key in (
            _meeting(number),
            *(_bell(number, each) for each in Stage),
            *(f"{number}/count/{each}" for each in Stage),
        ):
            self.remove(key, pieces=1)

    def end_barrier(self, key: str) -> None:
        """Remove the keys of `barrier`, once all have returned."""
        for each in (key, _full(key), _bell_of(key)):
            self.remove(each, pieces=1)


def _bell(number: int, stage: Stage) -> str:
    return f"{number}/bell/{stage}"


def _meeting(number: int) -> str:
    """The key of the key of the barrier to which ranks come."""
    return f"{number}/meeting"


def _full(key: str) -> str:
    return f"{key}/full"


def _bell_of(key: str) -> str:
    """The key of the bell of a barrier."""
    return f"{key}/bell"


def plan_mailbox(world_size: int, name: str) -> PlanMailbox:
    """The mailbox of this name for the job's ranks, which all of them call for.

    Raises FastckptError if there is no process group yet, and torch's DistStoreError if one of them does not come.
    """
    if world_size == 1:
        return PlanMailbox(dist.HashStore())  # type: ignore[attr-defined]
    if not dist.is_initialized():
        raise FastckptError(
            f"{world_size} ranks plan their saves together: call torch.distributed.init_process_group first"
        )
    return PlanMailbox(JobRanks.met().part_store(name))


@dataclass
class PlanRound:
    """A plan of all ranks, as far as this rank knows it.

    Attributes:
        number: Counts the plans.
        called: The save at which a rank called for it; None for the first, which all expect.
        structure: Of the state that this rank has offered to the plan; None before that.
        items: Those that the plan has this rank write, in each of its files; None until they are known.
        since: The first save that may follow the plan.
        spans: Where the items are in these files; None until this rank has reported it.
        described: The files with the place of each item, for the first local rank.
        complete: Whether nothing is missing.
    """

    number: int
    called: SaveId | None = None
    structure: list[Any] | None = None
    items: list[list[FlatItem]] | None = None
    since: SaveId | None = None
    spans: list[tuple[ShardLocation, ...]] | None = None
    described: dict[str, Plan] = field(default_factory=dict)
    complete: bool = False


@dataclass(frozen=True)
class Assigned:
    """A plan as the first rank has made it.

    Attributes:
        number: Of the plan.
        nodes: On which node each rank is.
        shards: The items that each rank writes.
        copies: The items of other nodes that it writes, too.
    """

    number: int
    nodes: Sequence[int]
    shards: list[list[WriteItem]]
    copies: list[list[WriteItem]]
    metadata: Metadata
