"""The first process of a container, if that is fastckpt-run: it passes signals on and reaps; the agent is its child.

The kernel lets no signal through to process 1 for which it has no handler, and torch takes signals only once workers
have started: a container that is stopped before would wait for SIGKILL. And process 1 has to reap all orphans, while an
agent that reaped whatever ends would take exit codes from those that wait for them.
"""

import os
import signal
from contextlib import suppress

from fastckpt_run.failures.deaths import OWN_FAULTS

_KEPT = OWN_FAULTS | {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU}
"""Signals that are about the process that gets them."""


def leave_to_child() -> None:
    """Go on in a child if this is process 1, which ends with the exit code of that child; else do nothing."""
    if os.getpid() != 1:
        return
    passed = signal.valid_signals() - _KEPT
    # Blocked signals reach process 1 without a handler, and one that comes before the fork waits for the child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed | {signal.SIGCHLD})
    child = os.fork()
    if child:
        os._exit(_tend(child, passed))
    if os.isatty(0):
        _take_terminal()  # else Ctrl-C would reach it twice
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tend(child: int, passed: set[signal.Signals]) -> int:
    """Pass signals on, and reap, until ``child`` has ended; its exit code, as a shell gives it."""
    while True:
        number = signal.sigwait(passed | {signal.SIGCHLD})
        if number != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # one SIGCHLD may stand for several
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code


def _take_terminal() -> None:
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # which stops who is in the background
    with suppress(OSError):
        os.tcsetpgrp(0, os.getpgrp())
