"""The deletion strategies that users of Flash Checkpoint know, over the pure retention policies."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from fastckpt.errors import ConfigError
from fastckpt.policy.retention import KeepEvery, KeepLast, Policy
from fastckpt.storage.directory import CheckpointDirectory
from fastckpt.storage.stored import Stored

logger = logging.getLogger(__name__)

DeleteFunction = Callable[[str], None]


class CheckpointDeletionStrategy(ABC):
    """Decides which checkpoints to delete; users may write their own, which run in the first local rank."""

    @abstractmethod
    def clean_up(self, step: int, delete_func: DeleteFunction) -> None:
        """Delete what need not be kept, now that the checkpoint of ``step`` is on storage.

        Args:
            step: The step of the checkpoint that was just completed.
            delete_func: Deletes the checkpoint at a path; see `delete_function` for what it refuses.
        """


class _PolicyStrategy(CheckpointDeletionStrategy):
    """Applies a policy to what lies on storage, so that a restart forgets nothing."""

    def __init__(self, policy: Policy, checkpoint_dir: str) -> None:
        self.policy = policy
        self._directory = CheckpointDirectory(checkpoint_dir)

    def clean_up(self, step: int, delete_func: DeleteFunction) -> None:
        """Delete every checkpoint on storage that the policy does not keep."""
        found = {stored.id: stored for stored in self._directory.checkpoints()}
        for id in sorted(set(found) - self.policy(found)):
            delete_func(str(found[id].path))


class KeepStepIntervalStrategy(_PolicyStrategy):
    """Keeps the checkpoints whose step is a multiple of ``keep_interval``, and the newest."""

    def __init__(self, keep_interval: int, checkpoint_dir: str) -> None:
        super().__init__(KeepEvery(keep_interval), checkpoint_dir)


class KeepLatestStepStrategy(_PolicyStrategy):
    """Keeps the newest ``max_to_keep`` checkpoints."""

    def __init__(self, max_to_keep: int, checkpoint_dir: str) -> None:
        super().__init__(KeepLast(max_to_keep), checkpoint_dir)


def policy_of(strategy: CheckpointDeletionStrategy | None) -> Policy | None:
    """The policy that the agent can apply in place of a strategy; None for a user's own, or none."""
    ours = type(strategy) in (KeepStepIntervalStrategy, KeepLatestStepStrategy)
    return strategy.policy if ours and isinstance(strategy, _PolicyStrategy) else None


def delete_function(directory: CheckpointDirectory) -> DeleteFunction:
    """What users' own strategies delete with: a function of a path.

    The path is a checkpoint's directory, the file that a user named for it, or ``<dir>/<step>``, as users of Flash
    Checkpoint write. A path that is no checkpoint of ours is left alone, with a warning.

    The function raises ConfigError for a path that is not inside the directory and for the newest whole
    checkpoint, PersistError if storage refuses.
    """

    def delete(path: str) -> None:
        root, real = Path(os.path.realpath(directory.path)), Path(os.path.realpath(path))
        if real == root or not real.is_relative_to(root):
            raise ConfigError(
                f"cannot delete {path}: it is {real}, but only checkpoints inside {root} can be deleted. "
                "Give the path of one of them, or remove it by other means."
            )
        ids = {stored.id for stored in directory.scan().places if _names(real, stored, root)}
        if not ids:
            logger.warning("%s is no checkpoint of ours; it was not deleted", path)
        for id in sorted(ids):
            directory.delete(id)

    return delete


def _names(real: Path, stored: Stored, root: Path) -> bool:
    return real in (Path(os.path.realpath(stored.path)), root / str(stored.id.step))
