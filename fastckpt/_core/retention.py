"""Deletion strategies with the names of Flash Checkpoint's, over the pure retention policies."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import TypeGuard

from fastckpt._core.arguments import count, directory, public, shown
from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.lineage import heads, kept, lines, passed_over, past, spared
from fastckpt._core.policy.retention import (
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepEveryMinutes,
    KeepLast,
    KeepMeasured,
    Policy,
    RetentionEntry,
    measured,
)
from fastckpt._core.storage.store import Store, StoredCheckpoint, normalised, open_store
from fastckpt.errors import ArgumentError, ConfigError

logger = logging.getLogger(__name__)

DeleteFunction = Callable[[str], None]

EPOCH = "epoch"
"""The metric that a checkpoint at the end of an epoch carries."""


class CheckpointDeletionStrategy(ABC):
    """Decides which checkpoints to delete; a subclass of your own runs in the first local rank."""

    @abstractmethod
    def clean_up(self, step: int, delete_func: DeleteFunction) -> None:
        """Delete older checkpoints, after that of ``step`` became durable.

        Args:
            step: The step of the new checkpoint.
            delete_func: Deletes the checkpoint at a path, with ConfigError outside of the directory; that of ``step``
                once a newer one is durable, as in Flash Checkpoint.
        """


class PolicyStrategy(CheckpointDeletionStrategy):
    """Applies a policy to the checkpoints on storage, so that a restart forgets nothing."""

    def __init__(self, policy: Policy, checkpoint_dir: str | Path) -> None:
        self.policy = policy
        self.location = normalised(directory(checkpoint_dir))

    def clean_up(self, step: int, delete_func: DeleteFunction) -> None:
        """Delete each checkpoint on storage that the policy does not keep."""
        with closing(open_store(self.location)) as store:
            found = {stored.id: stored for stored in store.checkpoints()}
        for id in obsolete(self.policy, found.values()):
            delete_func(str(found[id].path))


class KeepLatestStepStrategy(PolicyStrategy):
    """Keeps the newest ``max_to_keep`` checkpoints."""

    @public
    def __init__(self, max_to_keep: int, checkpoint_dir: str | Path) -> None:
        count("max_to_keep", max_to_keep, "KeepLatestStepStrategy(max_to_keep, checkpoint_dir)")
        super().__init__(KeepLast(max_to_keep), checkpoint_dir)


class KeepStepIntervalStrategy(PolicyStrategy):
    """Keeps the checkpoints whose step is a multiple of ``keep_interval``, and the newest."""

    @public
    def __init__(self, keep_interval: int, checkpoint_dir: str | Path) -> None:
        count("keep_interval", keep_interval, "KeepStepIntervalStrategy(keep_interval, checkpoint_dir)")
        super().__init__(KeepEvery(keep_interval), checkpoint_dir)


class KeepTimeIntervalStrategy(PolicyStrategy):
    """Keeps the first checkpoint of every ``minutes`` of the clock (60: of each hour), and the newest."""

    @public
    def __init__(self, minutes: float, checkpoint_dir: str | Path) -> None:
        super().__init__(KeepEveryMinutes(minutes), checkpoint_dir)


class KeepBestStrategy(PolicyStrategy):
    """Keeps the best checkpoints by a metric, and the newest.

    Args:
        max_to_keep: Number of best checkpoints.
        metric: Name in ``save_checkpoint(..., metrics={...})``.
        checkpoint_dir: The checkpoint directory.
        mode: "min" if small values are good, "max" if large ones are.
    """

    @public
    def __init__(self, max_to_keep: int, metric: str, checkpoint_dir: str | Path, mode: str = "min") -> None:
        super().__init__(KeepBest(max_to_keep, metric, mode), checkpoint_dir)


class KeepEpochStrategy(PolicyStrategy):
    """Keeps the checkpoints that were saved with ``metrics={"epoch": ...}``, and the newest."""

    @public
    def __init__(self, checkpoint_dir: str | Path) -> None:
        super().__init__(KeepMeasured(EPOCH), checkpoint_dir)


class KeepAnyStrategy(PolicyStrategy):
    """Keeps the checkpoints that at least one of several strategies of fastckpt keeps."""

    @public
    def __init__(self, *strategies: CheckpointDeletionStrategy) -> None:
        parts = [strategy for strategy in strategies if _is_ours(strategy)]
        if users := [type(strategy).__name__ for strategy in strategies if not _is_ours(strategy)]:
            raise ConfigError(
                f"{users[0]} cannot be part of a KeepAnyStrategy: what it would keep is not known before it deletes. "
                "Combine strategies of ours, or write one CheckpointDeletionStrategy for all."
            )
        policy = KeepAny(tuple(part.policy for part in parts))
        directories = sorted({part.location for part in parts})
        if len(directories) > 1:
            raise ConfigError(f"strategies for {directories} cannot be combined; give all the same directory")
        super().__init__(policy, directories[0])


def _is_ours(strategy: CheckpointDeletionStrategy | None) -> TypeGuard[PolicyStrategy]:
    """Return whether it applies its policy: a user's subclass may not."""
    return type(strategy) in (PolicyStrategy, *PolicyStrategy.__subclasses__())


def checked(name: str, strategy: object) -> None:
    """Raise ArgumentError for an object that is no strategy; any object with its method is one."""
    if strategy is not None and (isinstance(strategy, type) or not callable(getattr(strategy, "clean_up", None))):
        given = (
            f"{strategy.__name__}(...)" if isinstance(strategy, type) else "KeepLatestStepStrategy(3, checkpoint_dir)"
        )
        raise ArgumentError(f"{name} is {shown(strategy)}; give a strategy or None, which keeps all: {given}")


def warn_of_another_directory(strategy: CheckpointDeletionStrategy | None, location: str) -> None:
    """Warn if a strategy of ours was given another directory than the one in which it deletes."""
    if _is_ours(strategy) and strategy.location != location:
        logging.getLogger("fastckpt").warning(
            "deletion_strategy is for %s, and checkpoint_dir is %s, whose checkpoints it deletes: give it that one",
            strategy.location,
            location,
        )


def policy_of(strategy: CheckpointDeletionStrategy | None) -> Policy | None:
    """The policy that the agent can apply in place of a strategy; None for a user's own, or none."""
    return strategy.policy if _is_ours(strategy) else None


def obsolete(policy: Policy, found: Iterable[StoredCheckpoint]) -> list[SaveId]:
    """The checkpoints that a policy does not keep, oldest first; it decides by their manifests.

    Histories that the newest did not resume from are judged apart: it is no reason to delete any of theirs. Checkpoints
    that a resume passed over are kept.
    """
    known = {entry.id: entry for entry in _entries(found)}
    return sorted(SaveId(*id) for id in known.keys() - kept(policy, known.values()))


def passed_over_in(found: Iterable[StoredCheckpoint]) -> frozenset[SaveId]:
    """The checkpoints that a resume passed over without proof of damage: no other rule deletes them either."""
    return frozenset(SaveId(*id) for id in spared(_entries(found)))


def _entries(found: Iterable[StoredCheckpoint]) -> list[RetentionEntry]:
    manifests = {stored.id: stored.manifest for stored in found}
    return [
        RetentionEntry(
            id, m.time, measured(m.details.get("metrics")), past(m.details, m.parent), passed_over(m.details)
        )
        for id, m in manifests.items()
    ]


def retire(store: Store, policy: Policy, in_use: Callable[[], SaveId | None]) -> None:
    """Delete checkpoints that a policy does not keep, but for one that may be in use; raises PersistError.

    Those that are kept although newer ones go, such as the best one, are looked at first: the next best must not go for
    one that has lost files since.
    """
    found = store.known()
    doomed = {*obsolete(policy, found)}
    newest = max(doomed, default=SaveId(0, 0))
    older = (stored for stored in found if stored.id < newest and stored.id not in doomed)
    if not all(map(store.is_whole, older)):
        doomed = {*obsolete(policy, store.checkpoints())}
    for id in sorted(doomed - {in_use()}):
        store.delete(id)


class Deletion:
    """The delete function that users' own strategies are called with; it takes a path or URL.

    The path is a checkpoint's directory, the file that a user named for it, or ``<dir>/<step>``, as users of Flash
    Checkpoint write. A path that is no checkpoint of ours is left alone, with a warning.

    The newest whole checkpoint is deleted by `catch_up`, when it is not that any more. The newest of a history that
    the newest checkpoint did not resume from is left alone, with a warning, and so are those that a resume passed over.

    A call raises ConfigError for a path that is not inside the directory, PersistError if storage refuses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = normalised(str(store.path))
        self._put_off: set[SaveId] = set()

    def __call__(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint at a path."""
        real = normalised(path)
        if not real.startswith(self._root.rstrip("/") + "/"):
            raise ConfigError(
                f"cannot delete {path}: it is {real}, but only checkpoints inside {self._root} can be deleted. "
                "Give the path of one of them, or remove it by other means."
            )
        places = self._store.scan().places
        ids = {stored.id for stored in places if _is_named(stored, real, self._root)}
        if not ids:
            logger.warning("%s is no checkpoint of ours; it was not deleted", path)
        entries = _entries(places)
        passed = spared(entries)
        found = heads(entry for entry in entries if entry.id not in passed)
        newest, others = {*found[:1]}, {*found[1:]}
        for id in sorted(ids & passed):
            text = "%s was not deleted: %s was passed over at a resume, and nothing shows that it is damaged. Load it"
            text += " by resume_path, or remove it by other means"
            logger.warning(text, path, id)
        for id in sorted(ids & others):
            logger.warning(
                "%s was not deleted: %s is the newest of a history that this one did not resume from. To delete it: "
                "fastckpt prune %s --drop-history %d",
                path,
                id,
                self._store.path,
                id.history,
            )
        self._put_off |= ids & newest
        for id in sorted(ids - newest - others - passed):
            self._store.delete(id)

    def before(self, save: SaveId) -> SaveId | None:
        """The newest checkpoint on storage that this one has come after, in its line of training; None for none."""
        found = (line for line in lines(_entries(self._store.checkpoints())) if any(each.id == save for each in line))
        return max((SaveId(*each.id) for line in found for each in line if each.id < save), default=None)

    def catch_up(self) -> None:
        """Delete checkpoints that were the newest when a strategy chose them, and are not now; raises PersistError."""
        if not self._put_off:
            return
        entries = _entries(self._store.scan().places)
        found, newest = {SaveId(*entry.id) for entry in entries}, heads(entries)
        for id in sorted(self._put_off.difference(newest)):
            self._put_off.discard(id)
            if id in found:
                self._store.delete(id)


def _is_named(stored: StoredCheckpoint, real: str, root: str) -> bool:
    return real in (normalised(str(stored.path)), normalised(str(stored.place)), f"{root}/{stored.id.step}")
