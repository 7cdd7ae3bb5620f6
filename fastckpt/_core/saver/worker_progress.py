"""Reads how far the workers of a node are from the telemetry block, also after they have died."""

import logging
import threading
from pathlib import Path

from fastckpt._core.memory.telemetry import StepWindow, Telemetry, TelemetryBlock, telemetry_name, unlink
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")


class WorkerProgress:
    """The owner's side of the block that belongs to an arena. Without memory for it there is no telemetry.

    Attributes:
        name: Under which workers find the block; empty if there is none.
    """

    def __init__(self, arena: Path, ranks: int) -> None:
        self.name = telemetry_name(arena)
        self._ranks = ranks
        self._block: TelemetryBlock | None = None
        self._last = [Telemetry()] * ranks
        self._lock = threading.Lock()
        try:
            self._block = TelemetryBlock(self.name, ranks)
        # Telemetry is for reports and hang detection: a job without it trains and saves all the same.
        except FastckptError as error:
            unlink(self.name)
            self.name = ""
            logger.warning("workers cannot report their progress: %s", error)

    def read(self) -> list[Telemetry]:
        """The last telemetry of each worker; after `close`, as of then. May be called in any thread."""
        with self._lock:
            if self._block is not None:
                # Under the lock, because `close` unmaps the block while the agent's thread may be reading it.
                self._last = [self._block.read(rank) for rank in range(self._ranks)]
            return self._last

    def windows(self) -> list[list[StepWindow]]:
        """The newest windows of steps of each worker; none after `close`. May be called in any thread."""
        with self._lock:
            return [self._block.windows(rank) if self._block else [] for rank in range(self._ranks)]

    def log(self) -> None:
        """Log the last step and phase of each worker."""
        for rank, last in enumerate(self.read()):
            if last.beat:
                logger.info(
                    "local rank %d reached step %d before it ended (%s)", rank, last.step, last.phase or "training"
                )

    def close(self) -> None:
        """Remove the block."""
        self.read()
        with self._lock:
            block, self._block = self._block, None
        if block is not None:
            unlink(self.name)
            block.close()
