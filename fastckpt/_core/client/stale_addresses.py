"""Explanation, in the log, of a process group that does not form: gloo may have read addresses of dead workers."""

import logging
import sys
import threading
import traceback
from types import TracebackType

from fastckpt._core.config import RankInfo, copy_of_environment
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

PATIENCE = 30.0
"""Seconds in which a process group forms, if all workers are alike."""
FORMING = {"init_process_group", "new_group"}
EXPLANATION = (
    "torchrun keeps its store while it restarts workers: this one (restart %d) may have read there where a dead worker "
    "listened. fastckpt removes these addresses once all ranks have loaded; a group that failed, or was formed, "
    "at another time leaves them. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment and "
    "--standalone or --rdzv-backend=c10d (a static rendezvous, as with --master-addr, ignores it), or start the "
    "script with fastckpt-run."
)


def explain_stale_addresses() -> None:
    """Have the log explain, in a restarted worker of torchrun, why its process group fails to form, or does not yet."""
    try:
        place = RankInfo.from_environment(copy_of_environment())  # at import
    except ConfigError:
        return  # the first checkpointer says so
    if place.agent or not place.restart_count or not place.store_outlives_workers:
        return
    before, main = sys.excepthook, threading.current_thread().ident

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        names = {frame.name for frame in traceback.extract_tb(trace)}
        if FORMING & names and "gloo" in str(error).lower():
            logger.error("gloo could not connect the workers. " + EXPLANATION, place.restart_count)

    def look() -> None:
        frame = sys._current_frames().get(main or 0)
        if FORMING & {each.name for each in traceback.extract_stack(frame)}:
            text = f"the process group is still being formed, {PATIENCE:g} s after this worker began. {EXPLANATION}"
            logger.warning(text, place.restart_count)

    sys.excepthook = explain
    timer = threading.Timer(PATIENCE, look)
    timer.daemon = True
    timer.start()
