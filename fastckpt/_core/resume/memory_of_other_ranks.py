"""What this host's memory holds of a checkpoint directory for a node of another rank: this job does not look there."""

from contextlib import suppress
from pathlib import Path

from fastckpt._core.memory.census import ArenaState, census


def held_elsewhere(arena: Path, directory: str) -> list[str]:
    """Checkpoints in memory that this node, or another of this host that is no more, had when its rank was another.

    Args:
        arena: Where this node has its memory now.
        directory: The checkpoint directory.
    """
    with suppress(OSError):
        entries = {entry.path: entry for entry in census(arena.parent) if entry.directory == directory}
        if (ours := entries.pop(arena, None)) is not None:
            return [
                f"{entry.newest} in {entry.path} (in memory of this host, which was another node's)"
                for entry in entries.values()
                if entry.newest and entry.claim.is_of(ours.claim.seen, ours.claim.inode)
                and (entry.state is ArenaState.LEFT_BEHIND or entry.owner == ours.owner)
            ]  # fmt: skip
    return []
