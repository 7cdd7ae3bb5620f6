"""Reads the measurements that `Checkpointer` keeps in each checkpoint: the costs of that job's steps and saves."""

import json
from dataclasses import dataclass

from fastckpt._core.format.manifest import MODEL, TRAINING
from fastckpt._core.inspect.checkpoint_files import CheckpointFiles
from fastckpt._core.inspect.tree import read_tree
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.policy.frequency.profiling import Profile
from fastckpt._core.storage.reading import open_file
from fastckpt.errors import FastckptError

_KEYS = ("fastckpt", "tempo")
"""Under which `checkpointer.save_frequency` keeps them, as JSON."""


@dataclass(frozen=True)
class SavedProfile:
    """The profile of a job, the intervals that it was tuned to, if it was, and the overhead that it kept to."""

    profile: Profile
    intervals: Intervals | None
    overhead: float


def saved_profile(source: CheckpointFiles) -> SavedProfile | None:
    """The measurements in a checkpoint; None if it has none that can be read, as where the intervals were given."""
    file = source.files.get(TRAINING) or source.files.get(MODEL)
    if file is None:
        return None
    try:
        with open_file(file.path, file.size) as opened:
            tree = read_tree(opened, str(file.path))
        found = next(str(entry.value) for entry in tree if entry.keys[-2:] == _KEYS)
        content = json.loads(found)
        memory, storage = content["intervals"] or (None, None)
        intervals = Intervals(int(memory), int(storage)) if memory and storage else None
        return SavedProfile(Profile(**content["profile"]), intervals, float(content["overhead"]))
    # Whatever the checkpoint holds: unreadable values count as not measured.
    except (FastckptError, OSError, StopIteration, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None
