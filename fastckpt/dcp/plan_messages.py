"""Messages by which ranks plan their saves together, and what a rank knows of such a plan."""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from fastckpt._core.client.collective import StoreMailbox
from fastckpt._core.client.job_store import job_stores
from fastckpt._core.format.distcp import ShardLocation
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.plan import Plan
from fastckpt._core.torch_private.sharding import PLAN_PARTS
from fastckpt.dcp.flattening import FlatItem
from fastckpt.errors import FastckptError

_PARTS = (
    *PLAN_PARTS,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.TensorProperties,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
    torch.Size,
)
"""Types that a plan consists of, with dtypes and plain values; nothing else is unpickled."""
_ALLOWED = {(part.__module__, part.__name__): part for part in _PARTS}


class _Unpickler(pickle.Unpickler):
    """Reads messages; torch.load(weights_only=True) takes ten times as long for a plan of thousands of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """A type that a message may have; raises UnpicklingError for all else."""
        dtype = getattr(torch, name, None) if module == "torch" else None
        # A message of the store is a pickle from another process: only data types of a plan may come out of it.
        found = dtype if isinstance(dtype, torch.dtype) else _ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"a message of another rank has {module}.{name}")
        return found


class PlanMailbox(StoreMailbox):
    """Messages of what a `SavePlan` may consist of."""

    def encode(self, message: Any) -> bytes:
        """A pickle, as JSON has no plans."""
        return pickle.dumps(message)

    def decode(self, data: bytes) -> Any:
        """The message; raises UnpicklingError for what is no part of a plan."""
        return _Unpickler(io.BytesIO(data)).load()


def plan_mailbox(world_size: int, name: str) -> PlanMailbox:
    """The mailbox of this job's ranks that bears this name, which all of them call for.

    Raises FastckptError if there is no process group yet, and torch's DistStoreError if one of them does not come.
    """
    if world_size == 1:
        return PlanMailbox(dist.HashStore())  # type: ignore[attr-defined]
    if not dist.is_initialized():
        raise FastckptError(
            f"{world_size} ranks plan their saves together: call torch.distributed.init_process_group first"
        )
    return PlanMailbox(*job_stores(name)[1])


@dataclass
class PlanRound:
    """A plan of all ranks, as far as this rank knows it.

    Attributes:
        number: Counts the plans.
        called: The save at which a rank called for it; None for the first, which all expect.
        structure: Of the state that this rank has offered to the plan; None before that.
        items: What the plan has this rank write, in each of its files; None until it is known.
        since: The first save that may follow the plan.
        spans: Where the items are in these files; None until this rank has reported it.
        described: The files that say where each item is stored, for the first local rank.
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
        shards: What each rank writes.
        copies: What it writes of that of other nodes.
    """

    number: int
    nodes: Sequence[int]
    shards: list[list[WriteItem]]
    copies: list[list[WriteItem]]
    metadata: Metadata
