"""Acts in forked processes, which are ended with all that they have started."""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable


def forked(act: Callable[[], object], seconds: float = 120.0) -> int:
    """The exit status of a child with a session of its own; it is killed after so many seconds."""
    pid = os.fork()
    if not pid:
        os.setsid()
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    end = time.monotonic() + seconds
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < end:
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # those that it has left, too
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
