"""Options of DLRover's Flash Checkpoint that scripts may go on giving."""

import logging
from dataclasses import asdict, dataclass

logger = logging.getLogger("fastckpt")

_WHY = {
    "replica_count": "memory is not copied to other nodes: who loses a node resumes from storage",
    "comm_backend": "ranks agree over the store of the process group",
    "save_timeout": "ranks that do not save cost a save, and no time",
    "local_shard_num": "each rank says itself what it saves",
    "global_shard_num": "each rank says itself what it saves",
}


@dataclass(frozen=True)
class FlashOptions:
    """Options that the checkpointers of Flash Checkpoint take and that have no effect here."""

    replica_count: int = 0
    comm_backend: str = ""
    save_timeout: int = 0
    local_shard_num: int = 0
    global_shard_num: int = 0

    def report(self) -> None:
        """Log the given ones, and why they have no effect."""
        if ignored := [name for name, given in asdict(self).items() if given]:
            reasons = "; ".join(dict.fromkeys(_WHY[name] for name in ignored))
            logger.info("%s: without effect here, since %s", ", ".join(ignored), reasons)
