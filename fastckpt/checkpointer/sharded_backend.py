"""Training runs of which each rank has shards, as under FSDP, HSDP and tensor parallelism."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from fastckpt._core.client.optimizers import unwrapped
from fastckpt._core.replicas.replica_faults import Lacking
from fastckpt._core.session import SaveResult, StorageType
from fastckpt._core.torch_private.sharding import ShardedTensor, tree_leaves
from fastckpt.checkpointer.state import Part, TrainingState
from fastckpt.dcp.sharded_state import (
    ShardedModel,
    ShardedOptimizers,
    ShardedPart,
    ShardedState,
    as_before_on_error,
    parameters_of,
)
from fastckpt.dcp.state_dicts import MODEL, OPTIMIZER
from fastckpt.errors import ConfigError
from fastckpt.fsdp.shards import FsdpShardCheckpointer, FsdpState


class ShardedBackend(FsdpShardCheckpointer):
    """Saves runs of FSDP1, FSDP2 and DTensors."""

    _lacking: Lacking = "unlike"

    FROM_OTHERS: ClassVar[str] = (
        "To go on from a model that was not sharded with one that is: give what its model.pt has to set_state_dict of "
        "torch.distributed.checkpoint.state_dict, with full_state_dict=True, and another checkpoint directory "
        "(docs/guides/fsdp.md)."
    )

    @classmethod
    def parts(cls, parts: Mapping[str, Part], *, gradients: bool, staged: bool = False) -> Mapping[str, Part]:
        """Sharded state of these parts: the model, its optimizers, and other sharded objects.

        Args:
            parts: By name: "model", which is in no wrapper of torch's, "optimizer", "scheduler", and a user's names.
            gradients: Whether ``.grad`` of the parameters is to be saved for each rank.
            staged: Whether other ranks have other models, as of the stages of a pipeline.

        Raises:
            ConfigError: A run of these cannot be saved.
        """
        model, optimizers = parts[MODEL], _optimizers(parts[OPTIMIZER])
        assert isinstance(model, Module)
        for each in (each for part in parts.values() if isinstance(part, Module) for each in part.modules()):
            if isinstance(each, FSDPModule):
                each.reshard()  # after a forward its parameters are others, and whole
        _check(model, optimizers, gradients)
        sharded: dict[str, Part] = {
            name: ShardedModel(name, part, gradients=gradients and name == MODEL)
            for name, part in parts.items()
            if isinstance(part, Module) and (staged or _is_sharded(part))
        }
        return {
            **parts,
            **sharded,
            **({OPTIMIZER: ShardedOptimizers(OPTIMIZER, model, optimizers)} if optimizers else {}),
        }

    def resume(self, parts: TrainingState, own: dict[str, Any], step: int | None) -> Mapping[str, Any]:
        """Same as `ReplicatedBackend.resume`; without a checkpoint the first save allocates memory."""
        if not self._find("" if step is None else str(step)):
            return {}
        ranks = self._writer.ranks
        with ranks.sharing_errors():
            paths = (self._reader.metadata.planner_data or {}).values()
            there = {path[0]: parts.blank(path[0]) for path in paths} | self._reader.common
            sharded = [part for part, _ in parts.check(there) if isinstance(part, ShardedPart)]
        with as_before_on_error(sharded):
            state, extra = self._load(sharded)
            loaded = extra | state
            with ranks.sharing_errors():
                parts.load(loaded, self.rank_state)
        self._reader.restore()
        return loaded

    def save_checkpoint(  # type: ignore[override]  # the form of DdpCheckpointer
        self,
        step: int,
        state_dict: dict[str, Any],
        *,
        storage_type: StorageType,
        rank_state: dict[str, Any],
        metrics: Mapping[str, float],
    ) -> SaveResult:
        """Same as `ReplicatedBackend.save_checkpoint`."""
        shards = {name: state for name, state in state_dict.items() if isinstance(state, ShardedState)}
        common = {name: state for name, state in state_dict.items() if name not in shards}
        if self.last is None:
            _check_whole(common)
        return self._save(step, FsdpState(shards, common, rank_state), storage_type, metrics)


def _optimizers(given: Part) -> tuple[Optimizer, ...]:
    """Return the optimizers that a user gives; raises ConfigError for one that is none of torch's."""
    optimizers = tuple(given) if isinstance(given, Sequence) else (given,)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer is a {type(each).__name__}; with a sharded model give torch optimizers, whose states "
                "torch.distributed.checkpoint knows"
            )
    return tuple(map(unwrapped, optimizers))  # type: ignore[arg-type]


def _check(model: Module, optimizers: Sequence[Optimizer], gradients: bool) -> None:
    """Raise ConfigError for a state that cannot be saved."""
    ours = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if any(id(parameter) not in ours for parameter in parameters_of(optimizer)):
            raise ConfigError(
                f"{type(optimizer).__name__} has parameters that are not of the sharded {type(model).__name__}: make "
                "it after sharding, of model.parameters()"
            )
    if gradients and any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        raise ConfigError(
            "gradients=True: those of FSDP1 lie in flat parameters, and cannot be put back. Call step() after updates "
            "only, or give the loader accumulate=, or shard with fully_shard"
        )


def _is_sharded(module: Module) -> bool:
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules()) or any(
        isinstance(each, DTensor) for each in module.parameters()
    )


def _check_whole(common: Mapping[str, Any]) -> None:
    """Raise ConfigError if state that ranks should have in common has shards: such as that of an optimizer."""
    for name, state in common.items():
        if any(isinstance(each, DTensor | ShardedTensor) for each in tree_leaves(state)):
            raise ConfigError(
                f"{name} has a state of shards, and is no module: give an optimizer of the model as optimizer=, a copy "
                "of the model as a module"
            )
