"""The check that all nodes of a job have the same place behind the name of their checkpoint directory."""

import socket
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing

from fastckpt._core.client.collective import Agreement
from fastckpt._core.config import RankInfo
from fastckpt._core.storage.store import is_url, open_store
from fastckpt.errors import ConfigError, FastckptError

LISTED = 8
"""How many nodes, and how many places, a message names."""

Seen = tuple[int, str, str]
"""Number and host of a node, and the mark that it sees; an empty one, say of a read-only disk, tells nothing."""


def mark_seen(location: str, place: RankInfo) -> Seen | None:
    """What the first rank of a node sees, if the job has several nodes; it costs the others nothing."""
    if place.group_world_size == 1 or place.local_rank != 0:
        return None
    if is_url(location) and place.restart_count:
        return None  # restarted workers may resume from memory without the client of a store
    try:
        with closing(open_store(location)) as store:
            mark = store.identity().mark
    except FastckptError:
        mark = ""
    return place.group_rank, socket.gethostname(), mark


def check_shared(ranks: Agreement, location: str, place: RankInfo, said: Sequence[Seen | None]) -> None:
    """Raise ConfigError, in all ranks, if nodes see unlike marks; ``said`` is what each rank has seen.

    They look twice: of several that mark a store at once, the last has marked it.
    """
    if _is_one(said) or _is_one(said := ranks.gather(mark_seen(location, place))):
        return
    raise ConfigError(
        f"{location} is not the same directory on all nodes: {_in_words(said)}. Each node persists what its own ranks "
        "have, so no checkpoint would ever be whole. Mount one file system there on all nodes, such as NFS or Lustre, "
        "or give the URL of a store, such as s3://bucket/run1."
    )


def _is_one(said: Sequence[Seen | None]) -> bool:
    return len({seen[2] for seen in said if seen and seen[2]}) <= 1


def _in_words(said: Sequence[Seen | None]) -> str:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for node, host, mark in filter(None, said):
        if mark:
            places[mark].append(f"{node} ({host})")
    return "; ".join(
        f"nodes {_listed(nodes)} have {'one' if number == 0 else 'another'}"
        for number, nodes in enumerate(list(places.values())[:LISTED])
    )


def _listed(nodes: list[str]) -> str:
    more = len(nodes) - LISTED
    return ", ".join(nodes[:LISTED]) + (f" and {more} more" if more > 0 else "")
