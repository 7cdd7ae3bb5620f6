"""Failures by host, over all launches of a job: a host that fails again and again is one to look at."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastckpt._core.report.events import Event, objects, text

OWN = ("died", "hung", "agent")
"""Kinds of failures that are of a host's own, not for another node's sake."""


@dataclass(frozen=True)
class HostFailures:
    """Failures of a host.

    Attributes:
        host: Its name.
        failures: Starts of workers that ended there because one of them died or hung, or the agent died.
        first: In how many of these it was the first of all hosts: where one node fails, workers of others often do.
        checks: Node checks that it did not pass.
    """

    host: str
    failures: int
    first: int
    checks: int


def host_failures(incidents: Iterable[Sequence[tuple[str, str]]], events: Iterable[Event]) -> list[HostFailures]:
    """The hosts that have failed, the worst first.

    Args:
        incidents: Failures that struck together, each as (kind, host), in order of time.
        events: All events of all agents.
    """
    failures, first = Counter[str](), Counter[str]()
    for incident in incidents:
        own = [host for kind, host in incident if kind in OWN and host]
        failures.update(own)
        first.update(own[:1])
    checks = Counter[str]()
    for event in events:
        if event["event"] == "node_check" and text(event, "occasion") != "round":
            checks[text(event, "host")] += text(event, "verdict") == "problem"
        elif event["event"] == "node_check":
            # Bad nodes leave before they have a log there. The node of the first rank alone names them.
            checks.update(text(each, "host") for each in objects(event, "bad"))
    hosts = {host for host in (*failures, *checks) if host and (failures[host] or checks[host])}
    found = [HostFailures(host, failures[host], first[host], checks[host]) for host in hosts]
    return sorted(found, key=lambda one: (-one.first, -one.failures, -one.checks, one.host))
