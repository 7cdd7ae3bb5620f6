"""Bind a process to its parent: it does not outlive it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the process ``parent``, which must be its parent, dies.

    It does so when the *thread* ends that forked this process: torch starts workers in the one that runs the agent.
    """
    # Kept across execve, but cleared in a fork's child: each worker sets it for itself.
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it died before the kernel could know
