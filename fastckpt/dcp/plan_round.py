"""What a rank knows of one plan of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from fastckpt._core.format.distcp import ShardLocation as Span
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.plan import Plan
from fastckpt.dcp.flattening import FlatItem


@dataclass
class PlanRound:
    """What this rank knows of one plan of all ranks.

    Attributes:
        number: Counts the plans.
        called: The save at which a rank called for it; None for the first, which all expect.
        structure: Of the state that this rank has offered to the plan; None before that.
        items: What the plan has this rank write, in each of its files; None until it is known.
        since: The first save that may follow the plan.
        spans: Where the items lie in these files; None until this rank has said so.
        described: The files that say what lies where, for the first local rank.
        complete: Whether nothing is missing.
    """

    number: int
    called: SaveId | None = None
    structure: list[Any] | None = None
    items: list[list[FlatItem]] | None = None
    since: SaveId | None = None
    spans: list[tuple[Span, ...]] | None = None
    described: dict[str, Plan] = field(default_factory=dict)
    complete: bool = False


@dataclass(frozen=True)
class Assigned:
    """What the first rank has planned.

    Attributes:
        number: Of the plan.
        nodes: On which node each rank is.
        shards: What each rank writes.
        copies: What it writes of that of other nodes.
    """

    number: int
    nodes: Sequence[int]
    shards: list[list[WriteItem]]
    copies: list[list[WriteItem]]
    metadata: Metadata
