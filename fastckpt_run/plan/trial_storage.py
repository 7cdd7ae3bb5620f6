"""Removes a trial's files from a checkpoint directory that was empty before, unless another job came there."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fastckpt._core.inspect.inventory import take
from fastckpt._core.storage.history import DirectoryHistories, number_of
from fastckpt._core.storage.local.layout import PRIVATE, TRACKER, Layout
from fastckpt.errors import FastckptError

USED = "another job uses it by now"
"""Reason why nothing is removed: the files may be of that job, or it may go on from them."""


@dataclass(frozen=True)
class Remains:
    """Files left in the directory of a trial: names that the script itself has made, or why nothing was removed."""

    names: list[str] = field(default_factory=list)
    why: str = ""


def clear(directory: Path, launcher: int, *, is_new: bool) -> Remains:
    """Remove the checkpoints and records of a trial that has ended, and the directory if it was made for them.

    Args:
        directory: It was empty when the trial came.
        launcher: The process of the trial's agent, which holds the histories that it has opened.
        is_new: True if the directory itself is the trial's.
    """
    if not directory.is_dir():
        return Remains()
    layout = Layout(directory)
    with layout.alone() as alone:
        if not alone and layout.private.is_dir():
            return Remains(why=USED)
        if any(holder != launcher for holder in _holders(layout)):
            return Remains(why=USED)
        for path in _stored(directory):
            layout.files.remove(path)
    names = sorted(path.name for path in directory.iterdir())
    if is_new and not names:
        with contextlib.suppress(OSError):
            directory.rmdir()
    return Remains(names)


def _holders(layout: Layout) -> Iterator[object]:
    """The processes that hold the histories in a directory."""
    histories = DirectoryHistories(layout)
    for path in layout.private.iterdir() if layout.private.is_dir() else ():
        if number := number_of(path.name):
            record = histories.read(number)
            yield record.holder.get("pid") if record else None


def _stored(directory: Path) -> Iterator[Path]:
    """The checkpoints in a directory, then the records, which prove that these are not a stranger's."""
    with contextlib.suppress(FastckptError, OSError):
        for item in take(str(directory), str(directory / PRIVATE / "none")).items:
            if Path(item.path).is_relative_to(directory):
                yield Path(item.path)
    yield directory / TRACKER
    yield directory / PRIVATE
