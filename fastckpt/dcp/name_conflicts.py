"""Conflicts of names between states of several pipeline stages: one would load the tensors of another."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Module

from fastckpt._core.client.collective import Agreement
from fastckpt._core.replicas.replica_check import other_weights
from fastckpt._core.replicas.state_digest import digest_of
from fastckpt._core.torch_private.sharding import ShardedTensor, flat_parameters, group_of
from fastckpt._core.torch_private.tensors import local_part
from fastckpt.dcp.flattening import flattened
from fastckpt.dcp.stage_names import stages_in
from fastckpt.errors import ConfigError

_GROUP = re.compile(r"\.param_groups\.\d+\.params")
_REMEDY = (
    "Models of which each rank has another, such as pipeline stages, are not saved as one state: give stage= to "
    "Checkpointer or FsdpShardCheckpointer, which says whose state a rank saves"
)
Ranks = tuple[int, ...]


class StageClaim(NamedTuple):
    """Properties of a rank's state that must agree with those of other ranks.

    Attributes:
        staged: Whether stage= was given for it.
        groups: Of each group of parameters of an optimizer, by its name in DCP, a digest of their names.
        meshes: The ranks of each device mesh, and of each process group of FSDP1, that does not have them all.
        shards: Of each tensor on one of these: name, place in the whole, which mesh, shape and digest of the shard.
    """

    staged: bool
    groups: dict[str, str]
    meshes: list[Ranks]
    shards: list[tuple[str, Ranks, int, Ranks, str]]


def claim(leaves: Mapping[str, Any], plan: SavePlan, world: int) -> StageClaim:
    """The claim of a rank; reads shards of tensors but for those on a mesh of all ranks."""
    groups = {name: digest_of(value) for name, value in leaves.items() if _GROUP.search(name)}
    offsets = {item.index.fqn: tuple(item.index.offset or ()) for item in plan.items}
    shards: list[tuple[str, Ranks, Ranks, torch.Tensor]] = []
    for name, leaf in leaves.items():
        ranks, local = _local(leaf)
        # A mesh of all ranks is one model by construction; only meshes of some of them can be of different stages.
        if local is not None and name in offsets and len(ranks) < world:
            shards.append((name, offsets[name], ranks, local))
    return _claim(bool(stages_in(leaves)), groups, shards)


def _claim(staged: bool, groups: dict[str, str], shards: list[tuple[str, Ranks, Ranks, torch.Tensor]]) -> StageClaim:
    """Return the claim, with each shard's ranks by number."""
    meshes: dict[Ranks, int] = {}
    numbered = [
        (name, place, meshes.setdefault(ranks, len(meshes)), tuple(local.shape), digest_of(local))
        for name, place, ranks, local in shards
    ]
    return StageClaim(staged, groups, list(meshes), numbered)


def _local(leaf: Any) -> tuple[Ranks, torch.Tensor | None]:
    """The ranks that have shards of this tensor, and this rank's; none of a value that is no shard."""
    if type(leaf) is DTensor:
        return tuple(leaf.device_mesh.mesh.flatten().tolist()), local_part(leaf)
    if isinstance(leaf, ShardedTensor) and (own := leaf.local_shards()):
        return tuple(dist.get_process_group_ranks(group_of(leaf))), own[0].tensor
    return (), None


def check_one(model: Module, ranks: Agreement, world: int) -> None:
    """Raise ConfigError, in all ranks, if they have models of several stages; reads shards as `claim` does."""
    flat = flat_parameters(model)
    other_weights(model, ranks, shapes=not flat)
    if flat:  # to gather FSDP1's state is a collective, and needs room
        mine = _claim(False, {}, [each for each in flat if len(each[2]) < world])
    else:
        leaves = flattened({"model": get_model_state_dict(model)})
        mine = claim(leaves.state_dict, leaves.create_local_plan(), world)
    if why := objection([StageClaim(*each) for each in ranks.gather(mine)]):
        raise ConfigError(f"the states of the ranks do not go together: {why}")


def objection(claims: Sequence[StageClaim]) -> str:
    """The conflict between the states of ranks; empty if there is none."""
    for rank, each in enumerate(claims):
        if each.staged != claims[0].staged:
            has, other = ("no", "one") if each.staged else ("a", "none")
            return f"rank 0 has {has} stage, and rank {rank} {other}: give stage= on all ranks, or on none"
        if unlike := [name for name, digest in each.groups.items() if claims[0].groups.get(name, digest) != digest]:
            return f"{min(unlike)} of rank {rank} has other parameters than that of rank 0. {_REMEDY}"
    return _unlike_shards(claims)


def _unlike_shards(claims: Iterable[StageClaim]) -> str:
    """Replicas on meshes of their own, as of a tensor-parallel model in DistributedDataParallel, have equal shards."""
    found: dict[tuple[str, Ranks], tuple[int, Ranks, tuple[object, ...]]] = {}
    for rank, each in enumerate(claims):
        for name, offset, number, shape, digest in each.shards:
            mesh, what = each.meshes[number], (shape, digest)
            first, there, has = found.setdefault((name, tuple(offset)), (rank, mesh, what))
            # Equal bytes on two meshes are replicas, as of tensor parallelism within DDP; unlike ones are other models.
            if there != mesh and has != what:
                others = f"{name} of rank {first} is not that of rank {rank}, on another device mesh or process group"
                return f"{others}. {_REMEDY}"
    return ""
