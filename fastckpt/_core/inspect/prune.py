"""Removes checkpoints on storage that no policy keeps."""

from collections.abc import Collection, Sequence
from contextlib import closing

from fastckpt._core.inspect.inventory import Inventory, InventoryItem
from fastckpt._core.inspect.work_progress import UNOBSERVED, WorkObserver
from fastckpt._core.policy.lineage import kept, passed_over, past
from fastckpt._core.policy.retention import KeepAll, KeepAny, KeepBest, Policy, RetentionEntry, measured
from fastckpt._core.storage.store import open_store
from fastckpt.errors import ConfigError


def keep_best(text: str) -> KeepBest:
    """Read ``N:METRIC[:min|:max]``; raises ConfigError with the text for anything else."""
    count, _, rest = text.partition(":")
    metric, colon, mode = rest.rpartition(":")
    if not colon or mode not in ("min", "max"):
        metric, mode = rest, "min"
    if not count.isdecimal() or not metric:
        raise ConfigError(f"{text!r} is no N:METRIC[:min|:max], such as 3:loss or 3:accuracy:max")
    return KeepBest(int(count), metric, mode)


def divide(
    inventory: Inventory, policies: Sequence[Policy], dropped: Collection[int] = (), *, tier: str = "storage"
) -> tuple[list[InventoryItem], list[InventoryItem]]:
    """The whole checkpoints on storage, or in another tier: those that some policy keeps, and the others.

    The newest is always kept.

    Histories that the newest one did not resume from are judged apart, unless they are ``dropped``: nothing of those is
    kept. Without policies all others are. Checkpoints that a resume passed over are kept.

    Raises:
        ConfigError: There is no policy, and nothing to drop; no checkpoint has the metric of one, or is of a history to
            be dropped; the newest is.
    """
    if not (policies or dropped):
        raise ConfigError("give what to keep: --keep-last, --keep-every, --keep-minutes or --keep-best")
    stored = [item for item in inventory.whole if item.tier == tier]
    entries = [
        RetentionEntry(
            item.id,
            item.time or 0.0,
            measured(item.details.get("metrics")),
            past(item.details, item.parent),
            passed_over(item.details),
        )
        for item in stored
        if item.id is not None
    ]
    _check_metrics(policies, entries)
    _check_dropped(dropped, entries)
    others = [entry for entry in entries if entry.id[0] not in dropped]
    keep = kept(KeepAny(tuple(policies) or (KeepAll(),)), others)
    return [item for item in stored if item.id in keep], [item for item in stored if item.id not in keep]


def _check_metrics(policies: Sequence[Policy], entries: Sequence[RetentionEntry]) -> None:
    """Refuse to keep the best by a metric that was never measured: all but the newest would be deleted."""
    there = sorted({name for entry in entries for name in entry.metrics})
    for policy in policies:
        if entries and isinstance(policy, KeepBest) and policy.metric not in there:
            raise ConfigError(
                f"none of {len(entries)} checkpoints has the metric {policy.metric!r}, so none would be among the best "
                f"{policy.n}; {'there are ' + ', '.join(there) if there else 'they have no metrics at all'}. Nothing "
                "was deleted. Give one that they have, or keep by --keep-last, --keep-every or --keep-minutes."
            )


def _check_dropped(dropped: Collection[int], entries: Sequence[RetentionEntry]) -> None:
    there = sorted({entry.id[0] for entry in entries})
    for history in dropped:
        if history not in there:
            raise ConfigError(f"no whole checkpoint is of history {history}; there are {there}. Nothing was deleted.")
        if history == there[-1]:
            raise ConfigError(
                f"history {history} is that of the newest checkpoint, which is always kept; of {there} give one before "
                "it. Nothing was deleted."
            )


def delete(location: str, items: Sequence[InventoryItem], observer: WorkObserver = UNOBSERVED) -> None:
    """Remove checkpoints at a path or URL, oldest first; each is gone as a whole or not at all, whenever this ends.

    A running job may publish and delete meanwhile.

    Raises:
        PersistError: Storage refused.
    """
    observer.begin("delete", sum(item.size for item in items))
    with closing(open_store(location)) as store:
        for item in reversed(items):
            if item.id is not None:
                store.delete(item.id)
            observer.advance(item.size)
