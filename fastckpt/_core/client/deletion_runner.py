"""Runs a user's own deletion strategy on checkpoints that became durable."""

import logging
from collections import deque

from fastckpt._core.format.ids import SaveId
from fastckpt._core.metrics import counts
from fastckpt._core.retention import CheckpointDeletionStrategy, Deletion
from fastckpt._core.storage.store import Store, open_store
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")


class DeletionRunner:
    """Calls a user's own strategy with each checkpoint that became durable, in this process.

    Args:
        strategy: The user's; agents apply those of ours.
        directory: The checkpoint directory.
        news: Checkpoints that became durable, oldest first; emptied here.
    """

    def __init__(self, strategy: CheckpointDeletionStrategy, directory: str, news: deque[SaveId]) -> None:
        self._strategy = strategy
        self._directory = directory
        self._news = news
        self._store: Store | None = None
        self._delete: Deletion | None = None

    def clean_up(self) -> None:
        """Run it, here and never in the agent.

        Trouble with storage is logged. Any other exception is a mistake in the strategy that its user should see.
        It is raised from a save that is complete, and the next save goes on with the next checkpoint.
        """
        if not self._news:
            return
        if self._delete is None:
            self._store = open_store(self._directory)
            self._delete = Deletion(self._store)
            if before := self._delete.before(self._news[0]):  # a process before this one may have put it off
                self._news.appendleft(before)
        while self._news:
            save = self._news.popleft()
            try:
                self._delete.catch_up()
                self._strategy.clean_up(save.step, self._delete)
            except (FastckptError, OSError) as error:
                counts["deletion_failures"] += 1
                logger.warning("the deletion strategy could not delete: %s", error)
            except Exception as error:
                error.add_note(
                    f"Raised by the deletion strategy for step {save.step}, when all was saved; saves go on."
                )
                raise

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
