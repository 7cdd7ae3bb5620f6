"""Trainings of which all ranks have the whole state, as under DistributedDataParallel."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer

from fastckpt.ddp import DdpCheckpointer
from fastckpt.engine.deletion import CheckpointDeletionStrategy
from fastckpt.engine.parts import Part, Parts


class Whole(DdpCheckpointer):
    """The framework of DDP, and of models that nothing wraps."""

    FROM_OTHERS: ClassVar[str] = (
        "To go on from a sharded model with one that is not: make one file of its checkpoint with python -m "
        "torch.distributed.checkpoint.format_utils dcp_to_torch, load model and optimizer from it, and give another "
        "checkpoint directory (docs/fsdp.md)."
    )

    @classmethod
    def parts(cls, parts: Mapping[str, Part], *, gradients: bool) -> Mapping[str, Part]:
        """They have their states themselves."""
        return parts

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy,
        *,
        overlap: Sequence[Optimizer],
        **options: Any,
    ) -> None:
        super().__init__(checkpoint_dir, deletion_strategy, overlap=overlap, **options)
        self._foreseen = overlap[0] if len(overlap) == 1 else None

    def resume(self, parts: Parts, own: dict[str, Any]) -> Mapping[str, Any]:
        """As `Framework.resume`; foresees what the optimizer will hold, if there is one of them."""
        loaded = self.load_checkpoint()
        if loaded:
            parts.load(loaded, self.rank_state)
        else:
            self.prepare(parts.common() | own, self._foreseen)
        return loaded
