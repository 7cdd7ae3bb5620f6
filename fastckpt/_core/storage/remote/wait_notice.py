"""Log lines for a store that does not answer: the request, the store, and the longest wait."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from fastckpt._core.error_codes import coded

logger = logging.getLogger("fastckpt")

FIRST = 5.0
"""Seconds without an answer after which that is logged. A store that then answers has twice as long the next time."""
LONGEST = 60.0


class WaitNotice:
    """The requests of one store that have no answer yet. Of several, the first that is overdue speaks for all."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._patience = FIRST
        self._silent = False

    @contextlib.contextmanager
    def request(self, deed: str, limit: float | None) -> Iterator[None]:
        """A request is on its way for as long as this lasts: at most ``limit`` seconds; None if nobody knows."""
        patience = self._patience
        # A timer for each request, since the thread that makes it is blocked in the client.
        watch = threading.Timer(patience, self._tell, (deed, patience, limit))
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()
        if self._silent:
            self._silent, self._patience = False, min(LONGEST, 2 * self._patience)
            logger.info("%s answers again", self._url)

    def _tell(self, deed: str, patience: float, limit: float | None) -> None:
        if not self._silent:
            self._silent = True
            longest = f"up to {limit:.0f} s" if limit else "as long as its client tries"
            text = coded("%s has not answered for %.0f s (to %s): it is waited for, %s", "FC-023")
            logger.warning(text, self._url, patience, deed, longest)
