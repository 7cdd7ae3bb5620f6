"""Names of the checkpoints that frameworks lay out, and of directories that fastckpt has not written."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastckpt._core.format.manifest import NAME, is_plain
from fastckpt._core.storage.local.layout import TRACKER
from fastckpt.errors import ConfigError

FOLDER = "folder"
"""The detail that has the name of a checkpoint's directory."""

_STEP = re.compile("checkpoint-[0-9]+")
_LONGEST = 200
"""Bytes of a name: file systems take 255, and of some names others are made."""


@dataclass(frozen=True)
class CheckpointNames:
    """The name of a checkpoint.

    Attributes:
        folder: Name of its directory in the checkpoint directory; empty for ``checkpoint-<step>``. At a URL it is that.
        tracker: A file of the checkpoint directory in which the framework looks for the name of the newest one; empty
            for none. It is written when that is durable.
        begins_history: True if its files may be others than those of the same step that were saved under another name:
            it is the newer one. Equal on all ranks.
    """

    folder: str = ""
    tracker: str = ""
    begins_history: bool = False

    def check(self, step: int) -> None:
        """Raise ConfigError if no checkpoint of this step can be called so."""
        is_other_step = _STEP.fullmatch(self.folder) and self.folder != f"checkpoint-{step}"
        for name in filter(None, (self.folder, self.tracker)):
            if is_other_step or name == TRACKER or not _is_sound(name):
                raise ConfigError(
                    f"a directory or file of step {step} cannot be called {name!r}: choose a name of at most "
                    f"{_LONGEST} bytes without a slash, control characters, or blanks at its ends, which begins with "
                    f"no dot and is neither checkpoint-<number> nor {TRACKER}."
                )


BY_STEP = CheckpointNames()


def called(details: Mapping[str, Any], step: int) -> str:
    """The name that was saved with a checkpoint, if it is one: it may come from a stranger's manifest."""
    name = details.get(FOLDER)
    return name if isinstance(name, str) and is_plain(name) else f"checkpoint-{step}"


def is_foreign(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a directory that something else has written."""
    return bool(os.fspath(path)) and Path(path).is_dir() and not Path(path, NAME).exists()


def _is_sound(name: str) -> bool:
    """Return whether a name can be read back from the tracker."""
    return is_plain(name) and name.isprintable() and name == name.strip() and len(name.encode()) <= _LONGEST
