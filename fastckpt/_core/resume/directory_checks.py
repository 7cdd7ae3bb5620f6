"""Checks of the checkpoint directory: one place for all nodes, no checkpoints that a job ignores."""

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fastckpt._core.client.collective import Agreement
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.config import RankInfo
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import slots_of
from fastckpt._core.preflight import several_directories
from fastckpt._core.storage.local import foreign_files as f
from fastckpt._core.storage.store import is_url, open_store
from fastckpt.errors import ConfigError, FastckptError, NoLoadableCheckpoint

logger = logging.getLogger("fastckpt")

LISTED = 8
"""Nodes, and places, that a message names at most."""

Seen = tuple[int, str, str]
"""Number and host of a node, and the mark that it sees; an empty one, as of a read-only disk, is ignored."""


def mark_seen(location: str, place: RankInfo) -> Seen | None:
    """The mark that the first rank of one of several nodes sees; it costs the others nothing."""
    if place.local_rank != 0:
        return None
    if is_url(location) and place.restart_count:
        return None  # restarted workers may resume from memory without the client of a store
    try:
        with closing(open_store(location)) as store:
            mark = store.identity().mark
    except FastckptError:
        mark = ""
    return place.group_rank, socket.gethostname(), mark


def check_shared(ranks: Agreement, location: str, place: RankInfo, seen: Sequence[Seen | None]) -> None:
    """Raise ConfigError, in all ranks, if nodes see different marks; ``seen`` are each rank's.

    They look twice: if several mark a store at once, the mark of the last one stays.
    """
    if _is_one(seen) or _is_one(seen := ranks.gather(mark_seen(location, place))):
        return
    raise ConfigError(
        coded(
            f"{location} is not the same directory on all nodes: {_in_words(seen)}. Each node persists what its own "
            "ranks have, so no checkpoint would ever be whole. Mount one file system there on all nodes, such as NFS "
            "or Lustre, or give the URL of a store, such as s3://bucket/run1.",
            "FC-014",
        )
    )


def place_of(location: str, place: RankInfo) -> list[Any]:
    """The number of this node, and where the directory is on it, whichever links lead there."""
    return [place.group_rank, location if is_url(location) else os.path.realpath(location)]


def check_one(places: Sequence[Sequence[Any]]) -> None:
    """Raise ConfigError, in all ranks, if those of a node have several directories; ``places`` is rank by rank."""
    of_node: dict[int, tuple[int, str]] = {}
    for rank, (node, path) in enumerate(places):
        first, known = of_node.setdefault(node, (rank, path))
        if path != known:
            raise ConfigError(several_directories(first, known, rank, path))


def _is_one(seen: Sequence[Seen | None]) -> bool:
    return len({each[2] for each in seen if each and each[2]}) <= 1


def _in_words(seen: Sequence[Seen | None]) -> str:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for node, host, mark in filter(None, seen):
        if mark:
            places[mark].append(f"{node} ({host})")
    return "; ".join(
        f"nodes {_listed(nodes)} have {'one' if number == 0 else 'another'}"
        for number, nodes in enumerate(list(places.values())[:LISTED])
    )


def _listed(nodes: list[str]) -> str:
    more = len(nodes) - LISTED
    return ", ".join(nodes[:LISTED]) + (f" and {more} more" if more > 0 else "")


_WAYS = {
    f.FLASH: "DdpCheckpointer.load_checkpoint(resume_path='{path}/rank_0.pt')",
    f.DCP: "FsdpShardCheckpointer.load_checkpoint(model, optimizer, resume_path='{path}')",
    f.TORCH: "DdpCheckpointer.load_checkpoint(resume_path='{path}')",
    f.LIGHTNING: "trainer.fit(model, ckpt_path='{path}')",
    f.DEEPSPEED: "DeepSpeedCheckpointer.load_checkpoint('{parent}', tag='{name}')",
    f.TRAINER: "FastCheckpointTrainer.train(resume_from_checkpoint='{path}')",
    f.ACCELERATE: "AccelerateCheckpointer.load_state('{path}')",
}


def refuse_foreign(directory: str, ranks: Agreement) -> None:
    """Raise NoLoadableCheckpoint, in all ranks, if a directory has checkpoints of other libraries only.

    All ranks call it when there is nothing of ours to load; the first one looks. A URL is not searched.
    """

    def look(_: object) -> None:
        if text := _found(directory):
            raise NoLoadableCheckpoint(coded(text, "FC-015"))

    ranks.decide(None, look)


def _found(directory: str) -> str:
    if is_url(directory):
        return ""
    try:
        found = f.foreign(Path(directory))
    except OSError as error:
        return f"{directory} cannot be searched for checkpoints of others: {error}"
    if not found:
        return ""
    path, writer = max(found, key=lambda each: each.path.stat().st_mtime)
    way = _WAYS.get(writer, "").format(path=path, parent=path.parent, name=path.name)
    more = f", nor of {len(found) - 1} more there" if len(found) > 1 else ""
    return (
        f"{directory} holds no checkpoint of fastckpt, but {path}, which {writer} seems to have written: training would"
        f" start afresh, without the state of that{more}. {f'Load it with {way}, or' if way else 'Load it'} by what "
        f"wrote it, and save to another checkpoint directory. To start afresh, move it elsewhere."
    )


def warn_of_unloaded(client: SaverClient, save: SaveId) -> None:
    """Warn before the first save of a job if the directory has a checkpoint that the job has not loaded."""
    try:
        newest = _newest_before(client, save.history)
    except (FastckptError, OSError) as error:
        logger.debug("what was saved before %s could not be looked up: %s", save, error)
        return
    if newest is not None:
        logger.warning(
            coded(
                "step %d is saved to %s without loading step %d, which is there: a new history begins that does not go "
                "on from it. Call load_checkpoint() (of Checkpointer: resume()) before the first save, or give another "
                "directory. Retention keeps what was saved before; a checkpoint of the same step takes its place; to "
                "delete it: fastckpt prune %s --drop-history %d",
                "FC-009",
            ),
            save.step,
            client.options.directory,
            newest.step,
            client.options.directory,
            newest.history,
        )


def _newest_before(client: SaverClient, history: int) -> SaveId | None:
    """The newest checkpoint of an older history, in memory or durable. Nothing is pinned: other ranks may save now."""
    durable = client.status().newest
    found = [SaveId(*durable)] if durable else []
    found += [id for slot in slots_of(client.arena) if (id := slots.read(slot).committed)]
    return max((id for id in found if id.history < history), default=None)
