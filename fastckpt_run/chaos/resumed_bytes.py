"""Compares a checkpoint's bytes at a kill with its recorded digests, and with its files on storage."""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from fastckpt._core.format.ids import SaveId
from fastckpt._core.inspect.inventory import InventoryItem, take
from fastckpt._core.storage.reading import digest_of
from fastckpt.errors import BadCheckpoint, ConfigError, PersistError

LARGEST = 8 << 30
"""Bytes that are digested after a kill, at most: more would take the job's own memory bandwidth for seconds."""
DURABLE = 5.0
"""Seconds to wait for a flush of the resumed checkpoint, to compare it with."""
EQUAL, DIFFERENT, UNKNOWN = "equal", "different", "unknown"
Digests = Mapping[str, str]


def whole_items(location: str, shm_dir: str) -> list[InventoryItem]:
    """The whole checkpoints in memory and on storage, the newest first; [] where they cannot be listed."""
    try:
        return take(location, shm_dir).whole
    except (ConfigError, PersistError, OSError):
        return []


def bytes_in_memory(items: list[InventoryItem]) -> tuple[SaveId | None, Digests]:
    """The newest checkpoint of these in memory, and the digests of its bytes now; {} if it could not be read whole."""
    item = next((item for item in items if item.tier == "memory"), None)
    if item is None or item.id is None:
        return None, {}
    with suppress(BadCheckpoint, OSError):
        found = {name: digest_of(file.path, file.size) for name, file in item.files.items() if item.size <= LARGEST}
        if found and item.unchanged():
            return item.id, found
    return item.id, {}


def compare(location: str, shm_dir: str, resumed: SaveId, at_kill: Digests) -> tuple[str, str]:
    """Compare all that is known of the bytes of a checkpoint that was resumed; the verdict, and why.

    Args:
        location: The checkpoint directory.
        shm_dir: The tmpfs that holds arenas.
        resumed: The checkpoint.
        at_kill: Digests of its bytes in memory when its workers were dead; {} for none.
    """
    end = time.monotonic() + DURABLE
    sources = {"memory at the kill": dict(at_kill)} if at_kill else {}
    while True:
        items = [item for item in whole_items(location, shm_dir) if item.id == resumed]
        for item in items:
            digests = {name: file.digest for name, file in item.files.items() if file.digest}
            if digests:
                sources[f"the record of {item.tier}"] = digests
        if len(sources) > 1 or time.monotonic() > end:
            break
        time.sleep(0.1)
    if not at_kill:
        sources |= _read_now(items)
    return _verdict(sources)


def _read_now(items: list[InventoryItem]) -> dict[str, dict[str, str]]:
    """The digests of the stored files."""
    stored = next((item for item in items if item.tier == "storage" and item.size <= LARGEST), None)
    if stored is None:
        return {}
    try:
        return {"storage": {name: digest_of(file.path, file.size) for name, file in stored.files.items()}}
    except (BadCheckpoint, OSError) as error:
        return {"storage": dict.fromkeys(stored.files, f"unreadable: {error}")}


def _verdict(sources: Mapping[str, Digests]) -> tuple[str, str]:
    if len(sources) < 2:
        return UNKNOWN, "nothing else has the bytes of what was resumed, to compare them with"
    (first, ours), *others = sources.items()
    for name, theirs in others:
        for file in _common(ours, theirs):
            if ours[file] != theirs[file]:
                return DIFFERENT, f"{file}: {first} has {ours[file]}, {name} has {theirs[file]}"
    compared = {file for _, theirs in others for file in _common(ours, theirs)}
    if not compared:
        return UNKNOWN, "memory and storage have no file in common"
    return EQUAL, f"{len(compared)} files of {', '.join(sources)}"


def _common(ours: Digests, theirs: Digests) -> Iterator[str]:
    return (file for file in sorted(ours) if file in theirs)
