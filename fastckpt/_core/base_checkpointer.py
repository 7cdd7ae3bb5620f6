"""The base class of all checkpointers that save with a session."""

import logging
from types import TracebackType
from typing import Self

from fastckpt._core import arguments
from fastckpt._core.arguments import public
from fastckpt._core.session import Session

logger = logging.getLogger("fastckpt")


class BaseCheckpointer:
    """A checkpointer that saves with a `Session`: open until it is closed, or the with block ends."""

    _writer: Session

    def close(self) -> None:
        """End saving. Without fastckpt-run the last checkpoint is durable when rank 0 exits."""
        self._writer.close()

    @public
    def wait_latest_checkpoint(self, timeout: float = 1800) -> int | None:
        """Wait until each save with DISK is durable in the checkpoint directory; ``remote`` may be later.

        Of saves that newer ones may replace, the newest is.

        Args:
            timeout: Limit in seconds.

        Returns:
            Newest durable step; None if there is none.

        Raises:
            TimeoutError: The time is over.
            PersistError: The newest persist has failed for good.
        """
        return self._writer.wait(arguments.seconds("timeout", timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
