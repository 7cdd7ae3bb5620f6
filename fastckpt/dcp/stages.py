"""States that look like one and are several: of pipeline stages, one would come back with the tensors of another."""

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module

from fastckpt.dcp.leaves import flattened
from fastckpt.dcp.stage_names import stages_in
from fastckpt.engine.agreement import Agreement
from fastckpt.engine.same_model import other_weights
from fastckpt.errors import ConfigError

_GROUP = re.compile(r"\.param_groups\.\d+\.params")
_REMEDY = (
    "Models of which each rank has another, such as pipeline stages, are not saved as one state: give stage= to "
    "Checkpointer or FsdpShardCheckpointer, which says whose state a rank saves"
)
Ranks = tuple[int, ...]


class Claim(NamedTuple):
    """What of a rank's state must be as other ranks have it.

    Attributes:
        staged: Whether it is said to be that of a stage.
        groups: Of each group of parameters of an optimizer, by its name in DCP, a digest of their names.
        meshes: The ranks of each device mesh that does not have them all.
        whole: Of each tensor that is no shard, by its name, a digest.
        shards: Of each tensor on one of these: name, place in the whole, which mesh, shape and digest of the shard.
    """

    staged: bool
    groups: dict[str, str]
    meshes: list[Ranks]
    whole: dict[str, str]
    shards: list[tuple[str, Ranks, int, Ranks, str]]


def claim(leaves: Mapping[str, Any], plan: SavePlan, world: int) -> Claim:
    """What a rank claims; reads all tensors but for shards of those on a mesh of all ranks."""
    groups = {name: _digest_of(value) for name, value in leaves.items() if _GROUP.search(name)}
    parts = {name: leaf for name, leaf in leaves.items() if type(leaf) is DTensor and leaf.device_mesh.size() < world}
    offsets = {item.index.fqn: tuple(item.index.offset or ()) for item in plan.items}
    whole = {name: _digest_of(leaf) for name, leaf in leaves.items() if type(leaf) is torch.Tensor and _is_plain(leaf)}
    meshes: dict[Ranks, int] = {}
    shards = []
    for name, leaf in parts.items():
        if name in offsets:
            mesh = meshes.setdefault(tuple(leaf.device_mesh.mesh.flatten().tolist()), len(meshes))
            shards.append((name, offsets[name], mesh, tuple(leaf.shape), _digest_of(leaf._local_tensor)))
    return Claim(bool(stages_in(leaves)), groups, list(meshes), whole, shards)


def check_one(model: Module, ranks: Agreement, world: int) -> None:
    """Raise ConfigError, in all ranks, if they have models of several stages; reads shards as `claim` does."""
    has_flat = bool(FullyShardedDataParallel.fsdp_modules(model))
    other_weights(model, ranks, shapes=not has_flat)
    leaves = flattened({"model": {} if has_flat else get_model_state_dict(model)})
    said = ranks.gather(claim(leaves.state_dict, leaves.create_local_plan(), world))
    if why := objection([Claim(*each) for each in said]):
        raise ConfigError(f"the states of the ranks do not go together: {why}")


def objection(claims: Sequence[Claim]) -> str:
    """Why the states of ranks are not one; empty if they are."""
    for rank, each in enumerate(claims):
        if each.staged != claims[0].staged:
            has, other = ("no", "one") if each.staged else ("a", "none")
            return f"rank 0 has {has} stage, and rank {rank} {other}: give stage= on all ranks, or on none"
        if unlike := [name for name, digest in each.groups.items() if claims[0].groups.get(name, digest) != digest]:
            return f"{min(unlike)} of rank {rank} has other parameters than that of rank 0. {_REMEDY}"
    return _unlike_shards(claims)


def unlike_tensors(claims: Sequence[Claim]) -> list[str]:
    """The names of tensors that are no shards, and that ranks have unlike, such as averages of BatchNorm."""
    found: dict[str, str] = {}
    pairs = [pair for each in claims for pair in each.whole.items()]
    return sorted({name for name, digest in pairs if found.setdefault(name, digest) != digest})


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _unlike_shards(claims: Iterable[Claim]) -> str:
    """Replicas on meshes of their own, as of a tensor-parallel model in DistributedDataParallel, have equal shards."""
    found: dict[tuple[str, Ranks], tuple[int, Ranks, tuple[object, ...]]] = {}
    for rank, each in enumerate(claims):
        for name, offset, number, shape, digest in each.shards:
            mesh, what = each.meshes[number], (shape, digest)
            first, there, said = found.setdefault((name, tuple(offset)), (rank, mesh, what))
            if there != mesh and said != what:
                return f"{name} of rank {first} is not that of rank {rank}, on another device mesh. {_REMEDY}"
    return ""


def _digest_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        # not by way of numpy: a storage that it has seen cannot be resized any more
        return xxhash.xxh3_128_hexdigest((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return xxhash.xxh3_128_hexdigest(repr(value).encode())
