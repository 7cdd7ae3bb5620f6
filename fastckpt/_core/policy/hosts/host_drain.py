"""Hosts that an operator drains: whether the job can go on without them."""

from collections.abc import Collection, Sequence

NAMED = 8
"""Hosts that a message names at most."""


def refusal(host: str, members: Sequence[str], spares: Collection[str], fewest: int, stores: Collection[str]) -> str:
    """Return the reason why the job cannot go on without a host, with the remedy; empty if it can.

    Args:
        host: Its name.
        members: The hosts of all nodes that take part.
        spares: Hosts of nodes that wait for a place, and may have one.
        fewest: Number of nodes that the job needs.
        stores: The hosts that may hold the store of the rendezvous, if this one holds it; empty if another does.
    """
    left = [each for each in members if each != host]
    others = [each for each in spares if each != host]
    if len(left) < len(members) and len(left) + len(others) < max(1, fewest):
        return (
            f"the job needs {fewest} nodes (--nnodes), and without {host} it would have {len(left) + len(others)}, "
            f"with {len(others)} that wait for a place. Start another node first: one more than --nnodes has waits as "
            "a spare (--fast-spares); or start the job with --nnodes MIN:MAX"
        )
    if stores and all(each == host for each in stores):
        return (
            f"{host} holds the store of the rendezvous, and no other host may: without it the job could not restart. "
            "Start the job with several endpoints, such as --rdzv-endpoint a:29400,b:29400"
        )
    return ""


def named(hosts: Collection[str]) -> str:
    """The names of hosts, in words."""
    names = sorted(set(hosts))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more if names else "none"
