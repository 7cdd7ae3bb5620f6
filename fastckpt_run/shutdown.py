"""Wait for the last flush of a job, despite signals received meanwhile."""

import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from fastckpt._core.saver.server import Saver
from fastckpt_run.torchrun_patches import SIGNAL_HANDLER

logger = logging.getLogger("fastckpt.launcher")

SIGNALS_TO_GIVE_UP = 3
given_up = threading.Event()
"""Set when a flush or a heartbeat was left unfinished: its thread would keep this process from ending, or abort it."""
_TICK, _MARGIN = 0.1, 60.0


def close_with_timeout(
    saver: Saver, flush_timeout: float, signals: Sequence[signal.Signals | None], outcome: str
) -> None:
    """Close ``saver``, for the seconds of a flush and `_MARGIN` at most; a job's third signal gives up.

    ``signals`` grows as they come; see `signals_counted`. Raises SignalException when it gives up. If the ``outcome``
    is that the job succeeded, no other node has to run its end.
    """
    closed = threading.Event()

    def close() -> None:
        try:
            saver.close(finished=outcome == "succeeded")
        finally:
            closed.set()

    # In a thread that the process does not wait for, if we give up.
    threading.Thread(target=close, name="fastckpt-close", daemon=True).start()
    timeout = flush_timeout + _MARGIN
    end = time.monotonic() + timeout
    # Short waits: a signal's handler runs within one, and only this loop acts on its count.
    while not closed.wait(_TICK):
        if len(signals) >= SIGNALS_TO_GIVE_UP:
            given_up.set()
            # All of them may have come before, while the workers were ended.
            raise SignalException("gave up the last flush", signals[-1] or signal.SIGTERM)
        if time.monotonic() > end:
            given_up.set()
            logger.error("the saver did not end within %.0f s; it is left running, with its memory", timeout)
            return
    if saver.unfinished:
        given_up.set()


@contextmanager
def signals_counted(before: int) -> Iterator[Sequence[signal.Signals | None]]:
    """Collect the signals that torch would turn into exceptions, which could hit anything, and be swallowed.

    The first are those that came ``before``, of which it is not known which they were.
    """
    received: list[signal.Signals | None] = [None] * before

    def announce() -> None:
        left = SIGNALS_TO_GIVE_UP - len(received)
        if left > 0:
            name = received[-1].name if received[-1] else "signals"
            logger.warning("%s: the last flush goes on; %d more to give it up", name, left)

    def count(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        announce()

    if before > 1:
        announce()  # signals that came while workers were ended were counted in silence
    # Only signals that torch has taken: one that the user ignores stays ignored.
    numbers = [n for n in signal.valid_signals() if signal.getsignal(n) is SIGNAL_HANDLER]
    for number in numbers:
        signal.signal(number, count)
    try:
        yield received
    finally:
        for number in numbers:
            signal.signal(number, SIGNAL_HANDLER)


def signals_in(error: BaseException | None) -> int:
    """The number of signals received, one during the handling of another."""
    count = 0
    while error is not None:
        count += isinstance(error, SignalException)
        # A SignalException that is raised while another one is handled has that as its context.
        error = error.__context__
    return count
