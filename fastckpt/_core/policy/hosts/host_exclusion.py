"""Hosts that are left out while a spare waits: they failed again and again, for a cause that no other host shares."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence

HostFaults = Mapping[str, Sequence[str]]
"""Causes of the failures of hosts, by host, the oldest first."""
KEPT = 16
"""Causes that are kept of a host: the newest."""
_LONGEST = 100
"""Characters of a cause."""
_OTHERS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection abort",
    "socket closed",
    "no route to host",
    "unreachable",
    "broken pipe",
    "eoferror",
    "timed out",
    "timeout",
    "remote process exited",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "nccl",
    "replicasdiffer: another rank",
)
"""Words of exceptions that a worker raises when another one is gone, or at fault, in small letters."""
_OWN_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals for which the host may be to blame: a worker that lacks memory or hangs is killed."""
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def cause_of_host(exitcode: int, exception: str) -> str:
    """The cause of a worker's end as far as its own host may be to blame; empty if it may be another one's.

    Args:
        exitcode: Of the worker; negative for a signal.
        exception: Type and message of its exception; empty if that is not known.
    """
    if exitcode < 0:  # NCCL's watchdog ends a process by abort() when another one is gone
        return f"signal {-exitcode}" if -exitcode in _OWN_SIGNALS else ""
    if any(word in exception.lower() for word in _OTHERS):
        return ""
    # Ranks, addresses and sizes differ from host to host where the cause is the same.
    return _NUMBER.sub("#", exception)[:_LONGEST]


def with_faults(faults: HostFaults, new: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """The faults of hosts, with new ones: pairs of a host and a cause."""
    found = {host: tuple(causes) for host, causes in faults.items()}
    for host, cause in new:
        found[host] = (*found.get(host, ()), cause)[-KEPT:]
    return found


def suspects(faults: HostFaults, limit: int) -> frozenset[str]:
    """The hosts that have failed ``limit`` times or more for causes that no other host shares.

    A bug of the script, a lack of memory or a switch hits more than one host sooner or later: then it is nobody's.

    Args:
        faults: Of all hosts.
        limit: Number of failures that is too many; 0 for no limit.
    """
    if not limit:
        return frozenset()
    hosts: dict[str, set[str]] = {}
    for host, causes in faults.items():
        for cause in causes:
            hosts.setdefault(cause, set()).add(host)
    return frozenset(
        host for host, causes in faults.items() if sum(len(hosts[cause]) == 1 for cause in causes) >= limit
    )
