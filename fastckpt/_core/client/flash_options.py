"""Options of DLRover's Flash Checkpoint that scripts may go on giving."""

import logging
from collections.abc import Mapping
from typing import Any, TypedDict

from fastckpt._core.client.saver_options import RemoteTierOptions

logger = logging.getLogger("fastckpt")


class FlashOptions(TypedDict, total=False):
    """What the checkpointers of Flash Checkpoint take, and what has no effect here."""

    replica_count: int
    comm_backend: str
    save_timeout: int
    local_shard_num: int
    global_shard_num: int


class WriterOptions(RemoteTierOptions, FlashOptions, total=False):
    """Options that every checkpointer takes, by name."""


_WHY = {
    "replica_count": "memory is not copied to other nodes: who loses a node resumes from storage",
    "comm_backend": "ranks agree over the store of the process group",
    "save_timeout": "ranks that do not save cost a save, and no time",
    "local_shard_num": "each rank says itself what it saves",
    "global_shard_num": "each rank says itself what it saves",
}


def without_flash(options: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The options but for those of Flash Checkpoint; the first rank logs what these come to."""
    ignored = [name for name in _WHY if options.get(name)]
    if ignored and rank == 0:
        reasons = "; ".join(dict.fromkeys(_WHY[name] for name in ignored))
        logger.info("%s: without effect here, since %s", ", ".join(ignored), reasons)
    return {name: value for name, value in options.items() if name not in _WHY}
