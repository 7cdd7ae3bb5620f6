"""Completeness of a checkpoint: whether as many ranks as saved it could resume from its files."""

from collections.abc import Collection, Mapping

from fastckpt._core.format.file_names import own_of, shards_of
from fastckpt._core.format.manifest import JSON, METADATA, MODEL, Manifest

RANKS = "ranks"
"""The detail with the files that each rank has written, by its number, also of a rank that has written none."""


def missing_files(names: Collection[str], world_size: int, details: Mapping[str, JSON]) -> list[str]:
    """Files that a resume of as many ranks as saved would lack; empty for a checkpoint that counts.

    Args:
        names: The files that are there.
        world_size: Ranks of the job that saved.
        details: Details kept with the checkpoint. Without `RANKS`, as earlier versions wrote it, or in the memory of a
            node, the names of files decide. Then each rank has its own, unless a framework lays the files out.
    """
    written = details.get(RANKS)
    if isinstance(written, dict):
        wanted = [name for rank in range(world_size) for name in _written_by(rank, written)]
    else:
        wanted = _by_convention(names, world_size, details)
    there = {*names}
    return [name for name in dict.fromkeys(wanted) if name not in there]


def missing_of(manifest: Manifest) -> list[str]:
    """The same of a persisted checkpoint."""
    return missing_files([entry.name for entry in manifest.files], manifest.world_size, manifest.details)


def lacks(missing: list[str], world_size: int) -> str:
    """Describe a checkpoint in which files are missing."""
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"not for all of {world_size} ranks: {shown} missing"


def _written_by(rank: int, written: Mapping[str, JSON]) -> list[str]:
    files = written.get(str(rank))
    return [str(name) for name in files] if isinstance(files, list) else [f"the files of rank {rank}"]


def _by_convention(names: Collection[str], world_size: int, details: Mapping[str, JSON]) -> list[str]:
    ranks = range(world_size)
    own = [*map(own_of, ranks)]
    if METADATA in names:
        return [*map(shards_of, ranks)] if details.get("nodes", 1) != 1 else []
    is_of_framework = MODEL not in names and bool({*names} - {*own})
    return [] if is_of_framework else [MODEL, *own]
