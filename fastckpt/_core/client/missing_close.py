"""Warning for a job that ends without close(), and loses the steps since the last save."""

import logging
import os
import sys
import weakref

logger = logging.getLogger("fastckpt")


class MissingClose:
    """Warns when its owner is dropped, or the script ends, while steps are neither saved nor lost to an exception.

    Args:
        owner: A `Checkpointer`.
        rank: The first rank warns.

    Attributes:
        step: The last step that was done.
        saved: The last step that was saved.
    """

    def __init__(self, owner: object, rank: int) -> None:
        self.step = self.saved = self._first = 0
        self._resumed = False
        self._rank, self._pid = rank, os.getpid()
        self._final = weakref.finalize(owner, self._warn)

    def begin(self, step: int) -> None:
        """Note that training goes on after this step."""
        self.step = self.saved = self._first = step
        self._resumed = True

    def close(self) -> None:
        """Note that the owner was closed; warns only if it neither loaded nor began anything."""
        if self._final.detach() and not self._resumed and not self._rank and sys.exception() is None:
            logger.warning(
                "the checkpointer is closed without resume(): nothing was loaded, nothing saved. To train with it, "
                "call resume() before the loop, and step(n) after each step"
            )

    def _warn(self) -> None:
        is_failing = sys.exception() is not None or getattr(sys, "last_value", None) is not None
        if self._rank or self._pid != os.getpid() or is_failing or self.saved >= self.step:
            return
        logger.warning(
            "the training ended after step %d without close(): %s. End it with close(), which saves the last step, or "
            "write the loop in: with Checkpointer(...) as checkpointer:",
            self.step,
            f"step {self.saved} is the last that was saved" if self.saved > self._first else "nothing was saved",
        )
