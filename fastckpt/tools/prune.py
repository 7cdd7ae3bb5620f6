"""Removes checkpoints on storage that no policy keeps."""

from collections.abc import Sequence
from contextlib import closing

from fastckpt.errors import ConfigError
from fastckpt.policy.retention import Entry, KeepAny, KeepBest, Policy, measured
from fastckpt.storage.store import open_store
from fastckpt.tools.inventory import Inventory, Item


def keep_best(text: str) -> KeepBest:
    """Read ``N:METRIC[:min|:max]``; raises ConfigError with the text for anything else."""
    count, _, rest = text.partition(":")
    metric, colon, mode = rest.rpartition(":")
    if not colon or mode not in ("min", "max"):
        metric, mode = rest, "min"
    if not count.isdecimal() or not metric:
        raise ConfigError(f"{text!r} is no N:METRIC[:min|:max], such as 3:loss or 3:accuracy:max")
    return KeepBest(int(count), metric, mode)


def divide(inventory: Inventory, policies: Sequence[Policy]) -> tuple[list[Item], list[Item]]:
    """The whole checkpoints on storage: those that some policy keeps, and the others. The newest is always kept.

    Raises:
        ConfigError: There is no policy.
    """
    if not policies:
        raise ConfigError("say what to keep: --keep-last, --keep-every, --keep-minutes or --keep-best")
    stored = [item for item in inventory.whole if item.tier == "storage"]
    entries = [
        Entry(item.id, item.time or 0.0, measured(item.details.get("metrics")))
        for item in stored
        if item.id is not None
    ]
    kept = KeepAny(tuple(policies))(entries) | {max((entry.id for entry in entries), default=None)}
    return [item for item in stored if item.id in kept], [item for item in stored if item.id not in kept]


def delete(inventory: Inventory, items: Sequence[Item]) -> None:
    """Remove checkpoints, oldest first; each is gone as a whole or not at all, whenever this is interrupted.

    What a running job publishes meanwhile, or deletes by itself, is no trouble.

    Raises:
        PersistError: Storage refused.
    """
    with closing(open_store(inventory.location)) as store:
        for item in reversed(items):
            if item.id is not None:
                store.delete(item.id)
