"""How far the workers of a node are, as they say it in the telemetry block, for when they cannot say it any more."""

import logging
from pathlib import Path

from fastckpt import metrics
from fastckpt.errors import FastckptError
from fastckpt.memory.telemetry import TelemetryBlock, telemetry_name, unlink

logger = logging.getLogger("fastckpt")


class Progress:
    """The owner's side of the block that belongs to an arena. Without memory for it, nothing is said.

    Attributes:
        name: Under which workers find the block; empty if there is none.
    """

    def __init__(self, arena: Path, ranks: int) -> None:
        self.name = telemetry_name(arena)
        self._ranks = ranks
        self._block: TelemetryBlock | None = None
        try:
            self._block = TelemetryBlock(self.name, ranks)
        except FastckptError as error:
            unlink(self.name)
            self.name = ""
            logger.warning("workers cannot tell how far they are: %s", error)

    def tell(self) -> None:
        """Record and log how far each worker had come."""
        if self._block is None:
            return
        for rank in range(self._ranks):
            last = self._block.read(rank)
            if last.beat:
                metrics.event("progress", local_rank=rank, step=last.step, phase=last.phase)
                logger.info("local rank %d had come to step %d %s", rank, last.step, last.phase)

    def close(self) -> None:
        """Remove the block."""
        if self._block is not None:
            self._block.close()
            unlink(self.name)
