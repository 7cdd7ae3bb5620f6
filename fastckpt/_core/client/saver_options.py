"""Options that a checkpointer sends to the saver."""

import os
from dataclasses import dataclass, field
from typing import Any

from fastckpt._core.arguments import path
from fastckpt._core.policy import retention
from fastckpt._core.retention import CheckpointDeletionStrategy, checked, policy_of
from fastckpt._core.storage.store import is_url, normalised
from fastckpt.errors import ConfigError


@dataclass(frozen=True)
class SaverOptions:
    """Options that a checkpointer sends to the saver.

    Attributes:
        directory: The checkpoint directory: a real path, or a URL.
        policy: The retention policy, as `policy.retention` writes it; empty to keep all.
        verify: The part of a checkpoint that is compared with its saved digests, of `policy.verify`.
        remote: The place to upload durable checkpoints to, in the background; empty for none.
        remote_policy: The retention policy of that place.
    """

    directory: str
    policy: dict[str, Any] = field(default_factory=dict)
    verify: str = "resume"
    remote: str = ""
    remote_policy: dict[str, Any] = field(default_factory=dict)


def saver_options(
    directory: str,
    strategy: CheckpointDeletionStrategy | None,
    verify: str,
    remote: str | os.PathLike[str] = "",
    remote_deletion_strategy: CheckpointDeletionStrategy | None = None,
) -> SaverOptions:
    """The options of a checkpointer for the saver; raises ConfigError for a remote tier that cannot be."""
    for name, given in (("deletion_strategy", strategy), ("remote_deletion_strategy", remote_deletion_strategy)):
        checked(name, given)
    policy, remote_policy = (
        retention.to_json(p) if p else {} for p in map(policy_of, (strategy, remote_deletion_strategy))
    )
    location = normalised(text) if (text := path("remote", remote)) else ""
    if location and (is_url(directory) or location == directory):
        raise ConfigError(
            f"remote is {remote} and the checkpoint directory {directory}: a copy is made of what is in a directory "
            "on a disk, elsewhere. Give such a directory, or no remote."
        )
    if remote_deletion_strategy is not None and not (location and remote_policy):
        raise ConfigError(
            f"{type(remote_deletion_strategy).__name__} cannot delete what is in remote={remote!r}: give a remote "
            "store, and a strategy that fastckpt has: those of users do not run where uploads are made"
        )
    return SaverOptions(directory, policy, verify, location, remote_policy)
