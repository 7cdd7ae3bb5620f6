"""States that look like one and are several: of pipeline stages, one would come back with the tensors of another."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

_GROUP = re.compile(r"\.param_groups\.\d+\.params")
_REMEDY = (
    "Models of which each rank has another, such as pipeline stages, are not saved as one state: save them by "
    "DdpCheckpointer, with what each rank has as its rank_state, of a DTensor what to_local() gives"
)
Ranks = tuple[int, ...]


class Claim(NamedTuple):
    """What of a rank's state must be as other ranks have it.

    Attributes:
        groups: Of each group of parameters of an optimizer, by its name in DCP, a digest of their names.
        meshes: The ranks of each device mesh that does not have them all.
        shards: Of each tensor on one of these, by name and place in the whole: which mesh, shape, digest of the shard.
    """

    groups: dict[str, str]
    meshes: list[Ranks]
    shards: dict[tuple[str, Ranks], tuple[int, Ranks, str]]


def claim(leaves: Mapping[str, Any], plan: SavePlan, world: int) -> Claim:
    """What a rank claims; reads the shards of tensors on meshes that do not have all ranks."""
    groups = {name: _digest_of(value) for name, value in leaves.items() if _GROUP.search(name)}
    parts = {name: leaf for name, leaf in leaves.items() if type(leaf) is DTensor and leaf.device_mesh.size() < world}
    offsets = {item.index.fqn: tuple(item.index.offset or ()) for item in plan.items}
    meshes: dict[Ranks, int] = {}
    shards = {}
    for name, leaf in parts.items():
        if name in offsets:
            mesh = meshes.setdefault(tuple(leaf.device_mesh.mesh.flatten().tolist()), len(meshes))
            shards[name, offsets[name]] = mesh, tuple(leaf.shape), _digest_of(leaf._local_tensor)
    return Claim(groups, list(meshes), shards)


def objection(claims: Sequence[Claim]) -> str:
    """Why the states of ranks are not one; empty if they are."""
    for rank, each in enumerate(claims):
        if other := [name for name, digest in each.groups.items() if claims[0].groups.get(name, digest) != digest]:
            return f"{min(other)} of rank {rank} has other parameters than that of rank 0. {_REMEDY}"
    return _unlike_shards(claims)


def _unlike_shards(claims: Iterable[Claim]) -> str:
    """Replicas on meshes of their own, as of a tensor-parallel model in DistributedDataParallel, have equal shards."""
    found: dict[tuple[str, Ranks], tuple[int, Ranks, tuple[object, ...]]] = {}
    for rank, each in enumerate(claims):
        for (name, offset), (number, *what) in each.shards.items():
            mesh = each.meshes[number]
            first, there, whats = found.setdefault((name, offset), (rank, mesh, tuple(what)))
            if there != mesh and whats != tuple(what):
                return f"{name} of rank {first} is not that of rank {rank}, on another device mesh. {_REMEDY}"
    return ""


def _digest_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return xxhash.xxh3_128_hexdigest(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return xxhash.xxh3_128_hexdigest(repr(value).encode())
