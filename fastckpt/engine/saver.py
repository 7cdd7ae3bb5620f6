"""The service that owns arenas: it runs in the agent, or under plain torchrun in the first local rank."""

from fastckpt.config import Settings


class Saver:
    """Owns shared memory, answers writers and persists; all its work runs in threads of its own."""

    def __init__(self, settings: Settings) -> None:
        self.address = "@fastckpt-placeholder"
        self._settings = settings

    def start(self) -> None:
        """Listen at `address`, which workers find in FASTCKPT_AGENT."""

    def breakpoint(self) -> None:
        """Pin the newest checkpoint in memory and begin to flush it; call when all workers are dead and reaped."""

    def close(self) -> None:
        """Flush what memory holds newer than storage, then remove the arenas; waits up to ``flush_timeout``."""
