"""The gradients of a rank: the sum over micro-batches since the last update."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastckpt._core.config import RankInfo
from fastckpt._core.torch_private.tensors import local_part, untraced
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")


class Gradients:
    """``.grad`` of each parameter, of this rank: between updates ranks differ, if ``no_sync`` keeps them apart.

    Args:
        model: Its parameters.
        optimizers: Their steps use up the sum.
        data: A loader with ``accumulate`` has the position of the last update, and needs none.
        saved: Whether they are part of the state. If not, a save that would need them is warned of, once.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], data: Any, *, saved: bool
    ) -> None:
        self._model, self._saved = model, saved
        self._warns = getattr(data, "accumulate", 1) == 1
        self._added = False
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if optimizers and learning:
            learning[0].register_post_accumulate_grad_hook(self._adds)  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._uses)

    def state(self) -> dict[str, Any]:
        """State to save on this rank: the number of ranks, and gradients by the name of their parameter.

        Raises ConfigError for one that is sharded otherwise than its parameter.
        """
        if not self._saved:
            self._warn_if_needed()
            return {}
        named = self._model.named_parameters()
        grads = {name: _shard(name, parameter) for name, parameter in named if parameter.grad is not None}
        return {"world": RankInfo.from_environment().world_size, "grads": grads}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take back a result of `state`; parameters that had none have none.

        Args:
            state: None if this rank saved nothing, because there were fewer ranks, or it was no part of the state.

        Raises:
            ConfigError: A parameter is not there; nothing has changed then.
        """
        if not self._saved:
            return
        grads, world = (state or {}).get("grads", {}), RankInfo.from_environment().world_size
        if state is None or (grads and state["world"] != world):
            logger.warning(
                "gradients of %d ranks are not in this checkpoint, which is one of %s: if it was saved in the middle "
                "of accumulation, the next update lacks its micro-batches",
                world,
                f"{state['world']} ranks" if state else "fewer ranks, or without gradients",
            )
            grads = {}
        parameters = dict(self._model.named_parameters())
        if unknown := grads.keys() - parameters.keys():
            raise ConfigError(f"the checkpoint has gradients of {', '.join(sorted(unknown))}, which the model lacks")
        if other := [name for name in grads if grads[name].shape != local_part(parameters[name]).shape]:
            raise ConfigError(
                f"the gradient of {other[0]} has the shape {tuple(grads[other[0]].shape)} in the checkpoint, and its "
                f"parameter {tuple(local_part(parameters[other[0]]).shape)} on this rank: gradients are loaded in the "
                "same sharding only. Resume so, or pass gradients=False, which leaves out the micro-batches that "
                "they have"
            )
        for name, parameter in parameters.items():
            parameter.grad = None
            if name in grads:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
                local_part(parameter.grad).copy_(grads[name])

    def _warn_if_needed(self) -> None:
        if self._added and self._warns:
            self._warns = False
            logger.warning(
                "a checkpoint is saved in the middle of accumulation, without the gradients: what was added since the "
                "last step of an optimizer is lost if the job resumes from it. Pass gradients=True, or call step() "
                "after updates only, or give the loader accumulate= (if GradScaler skipped an update, nothing is lost)"
            )

    @untraced
    def _adds(self, parameter: torch.Tensor) -> None:
        self._added = True

    @untraced
    def _uses(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self._added = False


def _shard(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a gradient."""
    gradient: Any = parameter.grad
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise ConfigError(
            f"gradients=True: the gradient of {name} is {gradient.placements}, and its parameter "
            f"{getattr(parameter, 'placements', 'whole')}; ranks have yet to add it up. Call step() after updates only"
        )
    return local_part(gradient)
