"""Full state dicts of sharded models: a checkpoint is one file, which the first rank has gathered."""

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module

from fastckpt._core import arguments
from fastckpt._core.arguments import public
from fastckpt._core.client.collective import agreement
from fastckpt._core.session import SaveResult, StorageType
from fastckpt.dcp.call_forms import by_name
from fastckpt.dcp.name_conflicts import check_one
from fastckpt.dcp.state_dicts import (
    MODEL,
    OPTIMIZER,
    Optimizers,
    optimizers_of,
    sharded_parts,
    state_of,
)
from fastckpt.ddp import DdpCheckpointer


class FsdpFullCheckpointer(DdpCheckpointer):
    """Saves full state dicts of the first rank: a checkpoint is one file of ``torch.save`` that any job loads.

    A full state dict costs a collective, and the memory of the whole state on the first rank; `FsdpShardCheckpointer`
    needs neither.
    """

    _is_one = False
    """True if all ranks were found to have shards of one model."""

    @public
    def save_checkpoint(  # noqa: PLR0913  # the options of users, spelled out
        self,
        step: int,
        *state: Any,
        state_dict: Mapping[str, Any] | None = None,
        model: Module | None = None,
        optimizer: Optimizers | None = None,
        extra_sd: Mapping[str, Any] | None = None,
        path: str | os.PathLike[str] | None = None,
        storage_type: StorageType | None = None,
        rank_state: dict[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveResult:
        """Save as `DdpCheckpointer.save_checkpoint`, or a model with its ``optimizer`` and ``extra_sd``.

        ``save_checkpoint(step, state_dict, path, storage_type)``, or ``save_checkpoint(step, model, optimizer,
        extra_sd, path, storage_type)``; each also by name.

        Raises:
            ConfigError: In the first save, ranks have different models, such as pipeline stages.
        """
        given = by_name(
            state,
            state_dict=state_dict,
            model=model,
            optimizer=optimizer,
            extra_sd=extra_sd,
            path=path,
            storage_type=storage_type,
        )
        arguments.saving(step, given.get("state_dict"), rank_state, metrics)
        model = given.get("model")
        if isinstance(model, Module) and not self._is_one:
            world = self._writer.place.world_size
            check_one(model, agreement(world, "stages"), world)
            # Once: the check reads all shards, and a model does not become another one later.
            self._is_one = True
            for name in (MODEL, OPTIMIZER):  # gathered: the first rank alone has them
                self._differences.leave_out(name)
        whole = state_of(given, _gathered(model))
        return super().save_checkpoint(
            step, whole, given.get("path", ""), given.get("storage_type"), rank_state, metrics
        )

    @public
    def load_checkpoint(  # type: ignore[override]  # into a model, if there is one
        self, model: Module | None = None, optimizer: Optimizers = (), resume_path: str | os.PathLike[str] = ""
    ) -> dict[str, Any]:
        """Load as `DdpCheckpointer.load_checkpoint`; with a model, load into it, and return the rest."""
        state = super().load_checkpoint(resume_path)
        if model is None or not state:
            return state
        for part in sharded_parts(model, optimizers_of(optimizer)):
            part.load_state_dict(state[part.name], full=True)
        return {name: value for name, value in state.items() if name not in (MODEL, OPTIMIZER)}


def _gathered(model: object) -> StateDictOptions:
    """The whole state on the processor; torch ends the process if it is to move there what FSDP1 already has there."""
    if not isinstance(model, Module):
        return StateDictOptions(full_state_dict=True, cpu_offload=True)
    is_there = all(parameter.is_cpu for parameter in model.parameters())
    is_flat = bool(FullyShardedDataParallel.fsdp_modules(model))
    return StateDictOptions(full_state_dict=True, cpu_offload=not (is_flat and is_there))
