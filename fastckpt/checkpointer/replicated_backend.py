"""Training runs of which all ranks have the whole state, as under DistributedDataParallel."""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from fastckpt._core.client.collective import agreement
from fastckpt._core.replicas.replica_check import other_weights
from fastckpt._core.replicas.replica_faults import Lacking
from fastckpt.checkpointer.state import Part, TrainingState
from fastckpt.ddp import DdpCheckpointer

logger = logging.getLogger("fastckpt")


class ReplicatedBackend(DdpCheckpointer):
    """Saves runs of DDP, and of models that nothing wraps; a `ShardedBackend` has the same methods."""

    _lacking: Lacking = "unlike"

    FROM_OTHERS: ClassVar[str] = (
        "To go on from a sharded model with one that is not: make one file of its checkpoint with python -m "
        "torch.distributed.checkpoint.format_utils dcp_to_torch, load model and optimizer from it, and give another "
        "checkpoint directory (docs/guides/fsdp.md)."
    )

    @classmethod
    def parts(cls, parts: Mapping[str, Part], *, gradients: bool, staged: bool = False) -> Mapping[str, Part]:
        """The same parts: they have their states themselves."""
        return parts

    def resume(self, parts: TrainingState, own: dict[str, Any], step: int | None) -> Mapping[str, Any]:
        """Load the newest checkpoint that all ranks can load into all parts; all ranks call it.

        Args:
            parts: The state of the run.
            own: State that will be saved with them, to make memory ready if there is no checkpoint.
            step: The one to go back to instead, of those on storage.

        Returns:
            The entries of the checkpoint, by name; empty if nothing was ever saved.

        Raises:
            NoLoadableCheckpoint: Checkpoints exist, but none can be loaded.
            BadCheckpoint: That of ``step`` cannot be loaded.
            ConfigError: Parts are missing in it, or do not fit; or ranks have models of other parameters.
            FastckptError: Another rank has failed: names it, and the reason.
        """
        place = self._writer.place
        with self._writer.ranks.sharing_errors():
            self._writer.be_ready()
            other = other_weights(parts.model, agreement(place.world_size, "models"))
            loaded = self.load_checkpoint("" if step is None else f"{self._writer.directory}/checkpoint-{step}")
            if not loaded and other is not None and place.rank == 0:
                logger.warning(
                    "rank %d has other weights than rank 0, whose are saved for all: let DistributedDataParallel make "
                    "them equal before resume(), or, where ranks have stages of a pipeline, give stage=",
                    other,
                )
            if loaded:
                parts.load(loaded, self.rank_state)
            else:
                self.prepare(parts.common() | own, parts.sole_optimizer)
        return loaded
