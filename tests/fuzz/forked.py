"""Acts in forked processes, which are ended when they take too long."""

import contextlib
import os
import signal
import sys
import time
import traceback
from typing import Any

from fastckpt.errors import ConfigError

FAILED, REFUSED = 3, 4
"""How a child exits after an error, and after one of its user's."""
LIMIT_S = 120.0


def forked(act: Any, after: float | None = None) -> int:
    """The exit status of a child with a session of its own; it is killed after some seconds."""
    pid = os.fork()
    if not pid:
        os.setsid()
        try:
            act()
            os._exit(0)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            os._exit(REFUSED)
        except BaseException:
            traceback.print_exc()
            os._exit(FAILED)
    end, killed = time.monotonic() + (LIMIT_S if after is None else after), False
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > end:
            killed = True
            break
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # its loader workers, too
    if killed:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert not (killed and after is None), f"no end in {LIMIT_S:g} s"
    return os.waitstatus_to_exitcode(status)
